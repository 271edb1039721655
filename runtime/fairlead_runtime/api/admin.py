"""What operators ask of a server: metrics, drain, canary, the model's configuration, memory and
live requests.

Owns these routes of the admin port. Shows counts and states, never a prompt, a text or a key.
"""

import asyncio
import dataclasses

from starlette.responses import JSONResponse, Response

from fairlead_runtime.api.errors import ApiError
from fairlead_runtime.api.state import Face

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class Admin:
    def __init__(self, face: Face) -> None:
        self._face = face

    async def metrics(self) -> Response:
        backend = self._face.loaded()
        return Response(await asyncio.to_thread(backend.metrics), media_type=EXPOSITION)

    async def drain(self) -> Response:
        """Take no new requests from now on; running ones finish. Answers at once, may be repeated."""
        self._face.begin_drain()
        return JSONResponse({"draining": True})

    async def canary(self) -> Response:
        token = await self._face.loaded().service.canary()
        return JSONResponse({"token": token})

    async def model_config(self) -> Response:
        if self._face.model_config is None:
            raise ApiError(503, "the model's configuration is not known yet", code="not_ready")
        return Response(self._face.model_config, media_type="application/json")

    async def memory(self) -> Response:
        backend = self._face.loaded()
        return JSONResponse(dict(await asyncio.to_thread(backend.memory)))

    async def requests(self) -> Response:
        views = await self._face.loaded().service.requests()
        return JSONResponse({"requests": [dataclasses.asdict(view) for view in views]})
