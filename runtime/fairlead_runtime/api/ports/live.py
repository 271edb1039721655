"""The live picture of the batch beside the chat: who runs, what waits and why, who holds which
block.

Owns what of it a caller may see: with API keys the requests of its own key, and of all others
counts. Shows no prompt, no text, no key and no tenant.
"""

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.front.auth import tenant_of
from fairlead_runtime.outputs import (
    WHOLE_CACHE,
    BlockRun,
    BlockState,
    CacheView,
    RequestView,
)
from fairlead_runtime.request.sequence import Status

FRESH_SECONDS = 0.5  # a look at the engine serves everybody for so long
_UNITS = 100_000  # of a larger cache, longer in proportion: a map of 400,000 units takes 0.1 s
_HIDDEN = ("tenant", "priority")  # of a request


@dataclass(frozen=True, slots=True)
class _Look:
    requests: list[RequestView]
    cache: CacheView
    bodies: dict[str | None, bytes] = field(default_factory=dict)  # by tenant


class LivePicture:
    """However often it is asked for, the engine is looked at once in FRESH_SECONDS, of a large
    cache less often, and the answer to a caller is made once: it counts in no key's limits.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._look: asyncio.Task[_Look] | None = None
        self._began = 0.0
        self._longer = 1.0

    async def __call__(self, request: Request) -> Response:
        """Raises ApiError 503 while the model loads, ServiceError."""
        tenant = tenant_of(request.scope)
        look = await self._looked()
        if tenant not in look.bodies:
            look.bodies[tenant] = orjson.dumps(picture(look.requests, look.cache, tenant))
        return Response(
            look.bodies[tenant],
            media_type="application/json",
            headers={"cache-control": "no-store"},
        )

    async def _looked(self) -> _Look:
        service = self._state.loaded().service

        async def look() -> _Look:
            requests, cache = await service.requests(), await service.cache(WHOLE_CACHE)
            self._longer = max(1.0, cache.units / _UNITS)
            return _Look(requests, cache)

        now = asyncio.get_running_loop().time()
        fresh = now < self._began + FRESH_SECONDS * self._longer
        old = self._look is not None and self._look.done() and not fresh
        if self._look is None or old:
            self._look, self._began = asyncio.create_task(look()), now
        # One caller that leaves does not end what others wait for.
        return await asyncio.shield(self._look)


def picture(
    requests: Iterable[RequestView], cache: CacheView, tenant: str | None
) -> dict[str, Any]:
    """What the caller with this tenant sees; None: of a server without keys, all."""
    views = list(requests)
    own = [view for view in views if tenant is None or view.tenant == tenant]
    others = [] if tenant is None else [view for view in views if view.tenant != tenant]
    running = sum(view.status is not Status.PENDING for view in others)
    return {
        "requests": [_shown(view) for view in own],
        "others": {
            "running": running,
            "waiting": len(others) - running,
            "blocks": sum(view.blocks for view in others),
        },
        "cache": _map(cache, None if tenant is None else {view.id for view in own}),
    }


def _shown(view: RequestView) -> dict[str, Any]:
    fields = dataclasses.asdict(view)
    return {name: value for name, value in fields.items() if name not in _HIDDEN}


def _map(cache: CacheView, own: set[str] | None) -> dict[str, Any]:
    if own is not None:
        kept = [number for number, name in enumerate(cache.requests) if name in own]
        names = (cache.requests[number] for number in kept)
        numbers = {number: place for place, number in enumerate(kept)}
        runs = _joined(_anonymous(run, numbers, cache.per_cell) for run in cache.blocks)
        cache = replace(cache, requests=tuple(names), blocks=tuple(runs))
    return {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}


def _anonymous(run: BlockRun, numbers: dict[int, int], per_cell: int) -> BlockRun:
    """``run`` without what is known of requests that have no place in ``numbers``."""
    own = tuple(numbers[number] for number in run.requests if number in numbers)
    # In a cell of several units the most references may be those of a unit of others.
    if run.state is BlockState.REFERENCED and (not own or per_cell > 1):
        return replace(run, references=1, requests=own)
    return replace(run, requests=own)


def _joined(runs: Iterable[BlockRun]) -> Iterator[BlockRun]:
    """Neighbours that look alike, together: where one request of others ends is not to be seen."""
    before: BlockRun | None = None
    for run in runs:
        if before is not None and replace(run, first=before.first, count=before.count) == before:
            before = replace(before, count=before.count + run.count)
            continue
        if before is not None:
            yield before
        before = run
    if before is not None:
        yield before
