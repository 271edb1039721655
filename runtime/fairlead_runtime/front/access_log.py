"""The outermost middleware of both apps: gives every request an id and one log line, and handles
exceptions.

Owns the request id and the access log. Logs counts, routes and types only: no prompt, no text, no
key, no header and no exception's message, which could quote any of them.
"""

import logging
import re
import time
import traceback
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlead_runtime.front.auth import LIVE, OPEN_PATHS, tenant_of
from fairlead_runtime.front.errors import REQUEST_ID, internal_error, speaks_anthropic
from fairlead_runtime.front.limits import ClientDisconnected

_SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")

# Probes, and what the pages ask for each second: they are logged at level debug where the answer is
# good, or that the server is not ready, which the log says by itself.
QUIET = OPEN_PATHS | {LIVE, "/metrics", "/debug/startup", "/debug/requests", "/debug/cache"}

_log = logging.getLogger("fairlead.api")


class AccessLogMiddleware:
    """Pure ASGI: adds the request id to answer and log, and answers an unexpected exception with a
    500.
    """

    def __init__(self, app: ASGIApp, *, port: str) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = scope[REQUEST_ID] = _request_id(scope)
        names = [b"x-request-id", *([b"request-id"] if speaks_anthropic(scope) else [])]
        headers = [(name, request_id.encode()) for name in names]
        began, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *headers]
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except ClientDisconnected:
            # A 500 is what Starlette answers to any exception; here nobody was left to read it.
            status = 499 if status in (0, 500) else status
        except Exception as error:
            _log.error("request failed: %s", describe(error), extra={"request_id": request_id})
            if not status:
                await internal_error().response_to(scope)(scope, receive, answer)
            elif status != 500:
                raise  # a part of the answer is sent: only closing the connection shows the failure
        finally:
            self._log_request(scope, request_id, status, time.monotonic() - began)

    def _log_request(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        # The path of a route without parameters is safe to log; no other text of a path is.
        route = _route(scope)
        facts = {
            "request_id": request_id,
            "port": self._port,
            "method": scope["method"] if scope["method"] in {"GET", "HEAD", "POST"} else "other",
            "route": route,
            "status": status,
            "seconds": round(seconds, 4),
        }
        if (tenant := tenant_of(scope)) is not None:
            facts["tenant"] = tenant
        quiet = route in QUIET and status in (200, 503)
        _log.log(logging.DEBUG if quiet else logging.INFO, "request", extra=facts)


def _route(scope: Scope) -> str:
    if "endpoint" not in scope:
        return "other"
    route: str = scope["route"].path if scope.get("path_params") else scope["path"]
    return route


def log_late_failure(error: Exception, request_id: str) -> None:
    """Log an answer that failed after its first byte."""
    facts = {"request_id": request_id}
    _log.error("answer failed after its first byte: %s", describe(error), extra=facts)


def describe(error: BaseException) -> str:
    """The exception's type and where it was raised; not its message."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    place = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {place}"


def _request_id(scope: Scope) -> str:
    """The client's id when it is safe to log, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SAFE_ID.fullmatch(value):
            return str(value.decode())
    return uuid.uuid4().hex
