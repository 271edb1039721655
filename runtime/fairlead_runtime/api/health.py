"""The probes of both ports: whether to restart the process and whether to send it traffic.

Owns their answers; the engine's own ``health`` decides. Says forward progress, not that a port is
open.
"""

from starlette.responses import JSONResponse, Response

from fairlead_runtime.api.errors import ApiError
from fairlead_runtime.api.state import Face


class Probes:
    def __init__(self, face: Face) -> None:
        self._face = face

    async def healthz(self) -> Response:
        """200 while a restart would not help, 503 once it would."""
        health = self._face.health()
        return _answer(health.alive, health.reason, "not_alive")

    async def readyz(self) -> Response:
        """200 while new requests are wanted: loaded, making progress, not draining."""
        health = self._face.health()
        return _answer(health.ready, health.reason, "not_ready")


def _answer(good: bool, reason: str, code: str) -> Response:
    if good:
        return JSONResponse({"status": "ok"})
    return ApiError(503, reason or "not ready", code=code).response()
