"""The probes of both ports: whether to restart the process and whether to send it traffic.

The engine's ``health`` decides: it reports forward progress, not that a port is open.
"""

from starlette.responses import JSONResponse, Response

from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.front.errors import ApiError


class Probes:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def healthz(self) -> Response:
        """200 while the process is alive, 503 once only a restart helps."""
        health = self._state.health()
        return _answer(health.alive, health.reason, "not_alive")

    async def readyz(self) -> Response:
        """200 while the server takes new requests: loaded, making progress, not draining."""
        health = self._state.health()
        return _answer(health.ready, health.reason, "not_ready")


def _answer(good: bool, reason: str, code: str) -> Response:
    if good:
        return JSONResponse({"status": "ok"})
    return ApiError(503, reason or "not ready", code=code).response()
