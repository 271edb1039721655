"""The ``timeout`` of a request: its streams up to a time of the event loop's clock."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self

from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.outputs import Output, OutputStream, StreamTimes, Take


class TimedStream:
    """``stream`` up to ``deadline``; later ``anext`` raises ApiError 408. See
    outputs.OutputStream.
    """

    def __init__(self, stream: OutputStream, deadline: float) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._deadline = deadline

    @property
    def cached_tokens(self) -> int:
        return self._stream.cached_tokens

    @property
    def times(self) -> StreamTimes:
        return self._stream.times

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        try:
            async with asyncio.timeout_at(self._deadline):
                output = await anext(self._stream)
        except TimeoutError:
            raise _late() from None
        # An output that is ready is taken without a look at the clock.
        if asyncio.get_running_loop().time() > self._deadline:
            raise _late()
        return output

    async def forward(self, take: Take) -> None:
        def take_in_time(output: Output) -> Coroutine[Any, Any, None] | None:
            if asyncio.get_running_loop().time() > self._deadline:
                raise _late()
            return take(output)

        try:
            async with asyncio.timeout_at(self._deadline) as deadline:
                await self._stream.forward(take_in_time)
        except TimeoutError:
            if not deadline.expired():
                raise  # of the send: a socket's time-out is one
            raise _late() from None

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def _late() -> ApiError:
    message = "timeout: the answer is not complete in this time; allow more"
    return ApiError(408, message, param="timeout", code="timeout")
