"""Builds the two applications from their routes and middleware.

No documentation routes, no static files, no forms, no websockets: every path not listed
here is a 404.
"""

from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fairlead_runtime.api.ports.admin import Admin
from fairlead_runtime.api.ports.drain import CloseWhileDraining, Drain
from fairlead_runtime.api.ports.health import Probes
from fairlead_runtime.api.ports.page import Page
from fairlead_runtime.api.routes.completions import CHAT, COMPLETIONS, RESPONSES, EndpointHandler
from fairlead_runtime.api.routes.tokenize import TokenizeRoutes
from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.api.state.tracing import Traced
from fairlead_runtime.front import errors
from fairlead_runtime.front.access_log import AccessLogMiddleware
from fairlead_runtime.front.auth import READINESS, AuthMiddleware, Salter
from fairlead_runtime.front.key_file import KeyRing
from fairlead_runtime.front.limits import PromptPool
from fairlead_runtime.front.strict_body import check_model
from fairlead_runtime.outputs import ServiceError
from fairlead_runtime.request.sequence import RequestError


def public_app(state: ServerState, pool: PromptPool, keys: KeyRing | None = None) -> ASGIApp:
    """The public port: OpenAI's routes need one of ``keys``, the probes do not."""
    app = _bare()
    salter, probes = Salter(), Probes(state)

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(state)]})

    async def model(name: str) -> Response:
        check_model(name, state.name)
        return JSONResponse(_model(state))

    async def show_version() -> Response:
        return JSONResponse({"version": version("fairlead")})

    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"])  # names may have slashes
    app.add_api_route("/version", show_version, methods=["GET"])
    tokens = TokenizeRoutes(state, pool)
    app.router.routes.append(Route("/tokenize", tokens.tokenize, methods=["POST"]))
    app.router.routes.append(Route("/detokenize", tokens.detokenize, methods=["POST"]))
    for path, endpoint in (
        ("/v1/completions", COMPLETIONS),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", RESPONSES),
    ):
        route: ASGIApp = EndpointHandler(state, endpoint, pool, salter)
        if state.tracing is not None:
            route = Traced(route, state.tracing)
        app.router.routes.append(Route(path, route, methods=["POST"]))
    app.add_api_route("/healthz", probes.healthz, methods=["GET"])
    for path in READINESS:
        app.add_api_route(path, probes.readyz, methods=["GET"])
    outer: ASGIApp = CloseWhileDraining(AuthMiddleware(app, keys), state)
    if state.cors_origin:
        # Outside the keys: a browser's preflight has none, and a page may read a refusal.
        outer = CORSMiddleware(
            outer,
            allow_origins=[state.cors_origin],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return AccessLogMiddleware(outer, port="public")


def admin_app(state: ServerState, drain: Drain) -> ASGIApp:
    """The admin port. It needs no key: a network policy must guard it."""
    app = _bare()
    admin, probes = Admin(state, drain), Probes(state)
    app.add_api_route("/", Page().__call__, methods=["GET"])
    app.add_api_route("/metrics", admin.metrics, methods=["GET"])
    app.add_api_route("/healthz", probes.healthz, methods=["GET"])
    for path in READINESS:
        app.add_api_route(path, probes.readyz, methods=["GET"])
    app.add_api_route("/drain", admin.drain, methods=["POST"])
    app.add_api_route("/drain", admin.undo_drain, methods=["DELETE"])
    app.add_api_route("/canary", admin.canary, methods=["POST"])
    app.add_api_route("/model/config.json", admin.model_config, methods=["GET"])
    app.add_api_route("/debug/memory", admin.memory, methods=["GET"])
    app.add_api_route("/debug/requests", admin.requests, methods=["GET"])
    app.add_api_route("/debug/cache", admin.cache, methods=["GET"])
    return AccessLogMiddleware(app, port="admin")


def _bare() -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for kind in (errors.ApiError, RequestError, ServiceError):
        app.add_exception_handler(kind, _on_expected)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(Exception, _on_unexpected)
    return app


async def _on_expected(_request: Request, error: Exception) -> Response:
    return errors.from_exception(error).response()


async def _on_http(_request: Request, error: Exception) -> Response:
    """Answer the router's own refusals: an unknown path or a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    messages = {
        404: "this port has no such route",
        405: "this route does not accept that method",
    }
    return errors.ApiError(
        status, messages.get(status, "the request is not valid"), headers=headers
    ).response()


async def _on_validation(_request: Request, _error: Exception) -> Response:
    return errors.ApiError(400, "the request is not valid").response()


async def _on_unexpected(_request: Request, _error: Exception) -> Response:
    """Only answer: the exception goes on to AccessLogMiddleware, which logs it."""
    return errors.internal_error().response()


def _model(state: ServerState) -> dict[str, object]:
    service = state.loaded().service
    return {
        "id": state.name,
        "object": "model",
        "created": state.created,
        "owned_by": "fairlead",
        "root": state.source or state.name,
        "parent": None,
        "max_model_len": service.max_model_len,
    }
