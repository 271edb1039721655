"""A coroutine that seldom waits, run without a task of its own."""

import types
from collections.abc import Coroutine, Generator
from typing import Any

Rest = Coroutine[Any, Any, None]


def run_eagerly(coroutine: Rest) -> Rest | None:
    """Run ``coroutine`` up to its first wait. None where it ended before; else what is left of it,
    to be awaited in a task of the same event loop. Raises what it raises.
    """
    try:
        future = coroutine.send(None)
    except StopIteration:
        return None
    return _remainder(coroutine, future)


async def _remainder(coroutine: Rest, future: Any) -> None:
    try:
        await _wait_for(future)
    except BaseException:
        coroutine.close()
        raise
    await _go_on(coroutine)


@types.coroutine
def _wait_for(future: Any) -> Generator[Any, Any, None]:
    """Wait for what a coroutine gave to its task, as that task would have."""
    yield future


@types.coroutine
def _go_on(coroutine: Rest) -> Generator[Any, Any, None]:
    """``await`` refuses a coroutine that has begun."""
    yield from coroutine
