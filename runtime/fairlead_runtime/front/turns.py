"""One thread in which tenants take turns.

Owns the order: each tenant's work in the order in which it came, one piece of each tenant a round,
so that nobody waits behind all that another has sent.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Value = TypeVar("Value")


class TenantExecutor:
    """``name`` is the thread's; ``initializer`` is called in it first."""

    def __init__(self, name: str, initializer: Callable[[], None]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=initializer)
        self._lock = threading.Lock()
        # By tenant, the one whose turn is next first.
        self._waiting: dict[str, deque[Future[Any]]] = {}
        self._works: dict[Future[Any], Callable[[], Any]] = {}

    def submit(self, tenant: str, work: Callable[[], Value]) -> "Future[Value]":
        """Raises RuntimeError once it is closed."""
        future = Future[Value]()
        with self._lock:
            self._thread.submit(self._run_next)
            self._waiting.setdefault(tenant, deque()).append(future)
            self._works[future] = work
        # What is cancelled holds its body no longer: nothing counts it any more.
        future.add_done_callback(lambda done: self._works.pop(done, None))
        return future

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # closed
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            future = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
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
            waiting = [future for queue in self._waiting.values() for future in queue]
            self._waiting.clear()
            self._thread.shutdown(wait=False, cancel_futures=True)
        for future in waiting:
            future.cancel()
