"""The admin port's routes: metrics, drain, canary, the model's configuration, memory and live
requests.

Shows counts and states, never a prompt, a text or a key.
"""

import asyncio
import dataclasses

from starlette.responses import JSONResponse, Response

from fairlead_runtime.api.errors import ApiError
from fairlead_runtime.api.state import ServerState

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class Admin:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def metrics(self) -> Response:
        backend = self._state.loaded()
        return Response(await asyncio.to_thread(backend.metrics), media_type=EXPOSITION)

    async def drain(self) -> Response:
        """Refuse new requests from now on; running ones finish. Answers at once; may be
        repeated.
        """
        self._state.begin_drain()
        return JSONResponse({"draining": True})

    async def canary(self) -> Response:
        token = await self._state.loaded().service.canary()
        return JSONResponse({"token": token})

    async def model_config(self) -> Response:
        if self._state.model_config is None:
            raise ApiError(503, "the model's configuration is not loaded yet", code="not_ready")
        return Response(self._state.model_config, media_type="application/json")

    async def memory(self) -> Response:
        backend = self._state.loaded()
        return JSONResponse(dict(await asyncio.to_thread(backend.memory)))

    async def requests(self) -> Response:
        views = await self._state.loaded().service.requests()
        return JSONResponse({"requests": [dataclasses.asdict(view) for view in views]})
