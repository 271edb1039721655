"""Every error a client can see, in OpenAI's shape, or Anthropic's on the paths of its API.

Owns ApiError, the error objects and the type and code of each status. Never echoes input: a message
names the field and the fix, and an error body stays below 4 KiB for any input.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from fairlead_runtime.outputs import GrammarsBusy, QueueFull, QueueTimeout, ServiceError
from fairlead_runtime.request.sequence import RequestError

MAX_MESSAGE = 1900  # bytes; even if escaping doubles them, the body stays below 4 KiB
_INTERNAL = "the server failed on this request; its log has the details under the request id"

# OpenAI's error types by status; any other status is an invalid_request_error.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_CODES = {
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    500: "internal_error",
    503: "unavailable",
}

# Anthropic's error types in the same way.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
ANTHROPIC_PATH = "/v1/messages"  # and what is below it
REQUEST_ID = "fairlead.request_id"  # the scope's entry for the request's id


class ApiError(Exception):
    """An error answer. ``param`` names the body's field; ``code`` is a stable word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES.get(status, "invalid_value")
        self.headers = dict(headers or {})

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """The error about the field's name in ``names``."""
        if self.param is None or self.param not in names:
            return self
        name = names[self.param]
        message = self.message
        if message.startswith(f"{self.param}:"):
            message = name + message.removeprefix(self.param)
        return ApiError(self.status, message, param=name, code=self.code, headers=self.headers)

    @property
    def body(self) -> bytes:
        return orjson.dumps(self.content)

    @property
    def content(self) -> dict[str, Any]:
        return {
            "error": {
                "message": printable(self.message),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, media_type="application/json")

    def response_to(self, scope: Scope) -> Response:
        """The answer to a request, in the shape of its path's API."""
        if not speaks_anthropic(scope):
            return self.response()
        content = orjson.dumps(anthropic_content(self, scope.get(REQUEST_ID, "")))
        return Response(content, self.status, self.headers, media_type="application/json")


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the request's path belongs to Anthropic's API, as a route or not."""
    path: str = scope["path"]
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def anthropic_content(error: ApiError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": printable(error.message)},
        "request_id": request_id,
    }


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 for one field; the message starts with the field's name, as RequestError's does."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def internal_error() -> ApiError:
    """A 500 that shows no internal details."""
    return ApiError(500, _INTERNAL)


def from_exception(error: Exception) -> ApiError:
    """The answer for ``error``; internal_error for an unexpected type."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, ServiceError):
        status = 429 if isinstance(error, GrammarsBusy | QueueFull | QueueTimeout) else 503
        retry = max(1, round(error.retry_after or 1))
        return ApiError(status, str(error), code=error.code, headers={"retry-after": str(retry)})
    return internal_error()


def printable(message: str) -> str:
    """``message`` as one line of bounded length that is safe to print. Escapes unprintable
    characters (control and bidirectional marks, lone surrogates); keeps every script.
    """
    words = " ".join(message[:MAX_MESSAGE].split())
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    return text.encode()[:MAX_MESSAGE].decode(errors="ignore")


async def _on_expected(request: Request, error: Exception) -> Response:
    return from_exception(error).response_to(request.scope)


async def _on_unexpected(request: Request, _error: Exception) -> Response:
    """Only answer: the exception goes on to AccessLogMiddleware, which logs it."""
    return internal_error().response_to(request.scope)


# What an application of Starlette answers when an exception of a kind is raised in it.
HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _on_expected,
    RequestError: _on_expected,
    ServiceError: _on_expected,
    Exception: _on_unexpected,
}
