"""One thread in which tenants take turns."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from fairlead_runtime.request.tenant_queue import TenantQueue

Value = TypeVar("Value")


class TenantExecutor:
    """``name`` is the thread's; ``initializer`` is called in it first."""

    def __init__(self, name: str, initializer: Callable[[], None]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=initializer)
        self._lock = threading.Lock()
        self._waiting = TenantQueue[Future[Any]]()
        self._works: dict[Future[Any], Callable[[], Any]] = {}

    def submit(self, tenant: str, work: Callable[[], Value]) -> "Future[Value]":
        """Raises RuntimeError once it is closed."""
        future = Future[Value]()
        with self._lock:
            self._thread.submit(self._run_next)
            self._waiting.add(tenant, future)
            self._works[future] = work
        # What is cancelled holds its body no longer: nothing counts it any more.
        future.add_done_callback(lambda done: self._works.pop(done, None))
        return future

    def _run_next(self) -> None:
        with self._lock:
            turn = self._waiting.take()
        if turn is None:
            return  # closed
        _, future = turn
        if future.set_running_or_notify_cancel():
            try:
                value = self._works.pop(future)()
            except BaseException as error:  # noqa: BLE001 - who waits for it gets it
                future.set_exception(error)
            else:
                future.set_result(value)

    def close(self) -> None:
        """Cancel what waits; what runs goes on to its end."""
        with self._lock:
            waiting = self._waiting.clear()
            self._thread.shutdown(wait=False, cancel_futures=True)
        for future in waiting:
            future.cancel()
