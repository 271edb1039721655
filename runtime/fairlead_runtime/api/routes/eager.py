"""A coroutine that seldom waits, run without a task of its own."""

import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

Rest = Coroutine[Any, Any, None]


def run_eagerly(work: Awaitable[None]) -> Rest | None:
    """Run ``work``, a coroutine, up to its first wait. None where it ended before; else what is
    left of it, to be awaited in a task of the same event loop. Raises what it raises.
    """
    steps = work.__await__()
    try:
        future = next(steps)
    except StopIteration:
        return None
    return _remainder(steps, future)


async def _remainder(steps: Generator[Any, Any, None], future: Any) -> None:
    await _go_on(steps, future)


@types.coroutine
def _go_on(steps: Generator[Any, Any, None], future: Any) -> Generator[Any, Any, None]:
    """Wait for what ``steps`` gave to its task, as that task would have, then take the others."""
    try:
        yield future
    except BaseException:
        steps.close()
        raise
    yield from steps
