"""Builds the two applications from their routes and middleware.

No documentation routes, no static files, no forms, no websockets: every path not listed
here is a 404.
"""

from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fairlead_runtime.api.ports.admin import Admin
from fairlead_runtime.api.ports.health import Probes
from fairlead_runtime.api.ports.page import Page
from fairlead_runtime.api.routes.completions import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    EndpointHandler,
)
from fairlead_runtime.api.routes.tokenize import TokenizeRoutes
from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.api.state.tracing import Traced
from fairlead_runtime.front import errors
from fairlead_runtime.front.access_log import AccessLogMiddleware
from fairlead_runtime.front.auth import READINESS, AuthMiddleware
from fairlead_runtime.front.cors import readable_by_pages
from fairlead_runtime.front.drain import CloseWhileDraining, Drain
from fairlead_runtime.front.key_file import KeyRing
from fairlead_runtime.front.limits import PromptPool
from fairlead_runtime.front.strict_body import check_model


def public_app(state: ServerState, pool: PromptPool, keys: KeyRing | None = None) -> ASGIApp:
    """The public port: all routes but the probes need one of ``keys``."""
    app = _bare()
    probes = Probes(state)

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
    count = Route("/v1/messages/count_tokens", tokens.count, methods=["POST"])
    app.router.routes.append(count)
    for path, endpoint in (
        ("/v1/completions", COMPLETIONS),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", RESPONSES),
        ("/v1/messages", MESSAGES),
    ):
        route: ASGIApp = EndpointHandler(state, endpoint, pool)
        if state.tracing is not None:
            route = Traced(route, state.tracing)
        app.router.routes.append(Route(path, route, methods=["POST"]))
    app.add_api_route("/healthz", probes.healthz, methods=["GET"])
    for path in READINESS:
        app.add_api_route(path, probes.readyz, methods=["GET"])
    outer: ASGIApp = CloseWhileDraining(AuthMiddleware(app, keys), state)
    # Outside the keys: a browser's preflight has none, and a page may read a refusal.
    return AccessLogMiddleware(readable_by_pages(outer, state.cors_origin), port="public")


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
    for kind, handler in errors.HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(RequestValidationError, _on_validation)
    return app


async def _on_validation(request: Request, _error: Exception) -> Response:
    return errors.ApiError(400, "the request is not valid").response_to(request.scope)


def _model(state: ServerState) -> dict[str, object]:
    backend = state.loaded()
    return {
        "id": state.name,
        "object": "model",
        "created": state.created,
        "owned_by": "fairlead",
        "root": state.source or state.name,
        "parent": None,
        "max_model_len": backend.service.max_model_len,
        "sampling_defaults": dict(backend.rules.sampling),
    }
