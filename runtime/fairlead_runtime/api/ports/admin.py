"""The admin port's routes: metrics, drain, canary, the prefix cache, the model's configuration,
memory, the block map and live requests.

Shows counts and states, never a prompt, a text or a key.
"""

import dataclasses
from typing import Any

import orjson
from starlette.responses import JSONResponse, Response

from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.front.drain import Drain
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.outputs import WHOLE_CACHE
from fairlead_runtime.settings.engine_config import flag_of
from fairlead_runtime.settings.metric_names import TENANT_RUNNING, TENANT_WAITING

_BY_TENANT = (TENANT_WAITING.encode(), TENANT_RUNNING.encode())
ALL = "all"  # in place of the first unit of the block map
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(state: ServerState) -> Response:
    return Response(await state.loaded().metrics(), media_type=EXPOSITION)


async def public_metrics(state: ServerState) -> Response:
    """Without the series by tenant: one tenant of the public port must not see the others."""
    lines = (await state.loaded().metrics()).splitlines(keepends=True)
    shown = b"".join(line for line in lines if not any(name in line for name in _BY_TENANT))
    return Response(shown, media_type=EXPOSITION)


class Admin:
    def __init__(self, state: ServerState, drain: Drain) -> None:
        self._state = state
        self._drain = drain

    async def drain(self) -> Response:
        """Drain as after SIGTERM, without the end of the process. Answers at once; may be
        repeated.
        """
        self._drain.begin()
        return JSONResponse({"draining": True})

    async def undo_drain(self) -> Response:
        """Be ready and serve again. May be repeated."""
        self._drain.undo()
        return JSONResponse({"draining": False})

    async def canary(self) -> Response:
        token = await self._state.loaded().service.canary()
        return JSONResponse({"token": token})

    async def reset_prefix_cache(self) -> Response:
        """Evict every cached block that no request holds; answers how many, in units of the
        block map.
        """
        reset = await self._state.loaded().service.reset_prefix_cache()
        return JSONResponse({"evicted": reset.evicted, "held": reset.held})

    async def model_config(self) -> Response:
        if self._state.model_config is None:
            raise ApiError(503, "the model's configuration is not loaded yet", code="not_ready")
        return Response(self._state.model_config, media_type="application/json")

    async def startup(self) -> Response:
        """What the start does, and the seconds of its parts; also while it lasts."""
        state = self._state
        return JSONResponse({"model": state.name, **state.startup.as_dict})

    async def memory(self) -> Response:
        return JSONResponse(self._sizing())

    async def cache(self, start: str = "0") -> Response:
        """The block map from unit ``start`` on, or of ``all``, and the sizing of the cache."""
        if start != ALL and not (start.isascii() and start.isdigit() and len(start) < 16):
            reason = f"start: send a whole number, the first unit to show, or {ALL}"
            raise ApiError(400, reason, param="start")
        backend = self._state.loaded()
        first = WHOLE_CACHE if start == ALL else int(start)
        view = await backend.service.cache(first)
        if first >= view.units:
            reason = f"start: the cache has {view.units} units, from 0 to {view.units - 1}"
            raise ApiError(400, reason, param="start")
        fields = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
        more = {
            "held": view.units - view.free - view.cached,
            "next": view.end if view.end < view.units else None,
            "sizing": self._sizing(),
        }
        # orjson: thousands of runs would hold the event loop for long in the standard library.
        return Response(orjson.dumps(fields | more), media_type="application/json")

    def _sizing(self) -> dict[str, Any]:
        """The engine's sizing, with the connections and files that this process may open."""
        memory, ports = self._state.loaded().memory, self._state.port_bounds
        if ports is None or "bounds" not in memory:
            return dict(memory)
        public = {"most": ports.public.most, "reason": ports.public.text(flag_of)}
        files = {**memory["bounds"]["openFiles"], "most": ports.files}
        bounds = {**memory["bounds"], "connections": public, "openFiles": files}
        return {**memory, "bounds": bounds}

    async def requests(self) -> Response:
        views = await self._state.loaded().service.requests()
        return JSONResponse({"requests": [dataclasses.asdict(view) for view in views]})
