"""Builds the two applications from their routes and middleware.

No pages of documentation, no static files, no forms, no websockets: every path not listed
here is a 404.
"""

import functools
from importlib.metadata import version
from importlib.resources import files

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fairlead_runtime.api.ports import elsewhere
from fairlead_runtime.api.ports.admin import Admin, metrics, public_metrics
from fairlead_runtime.api.ports.health import Probes
from fairlead_runtime.api.ports.live import LivePicture
from fairlead_runtime.api.ports.page import CHAT as CHAT_PAGE
from fairlead_runtime.api.ports.page import WATCH, Page
from fairlead_runtime.api.routes.completions import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    EndpointHandler,
)
from fairlead_runtime.api.routes.invocations import Invocations
from fairlead_runtime.api.routes.tokenize import TokenizeRoutes
from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.api.state.tracing import Traced
from fairlead_runtime.front import errors
from fairlead_runtime.front.access_log import AccessLogMiddleware
from fairlead_runtime.front.auth import LIVE, PAGE, READINESS, AuthMiddleware
from fairlead_runtime.front.cors import ForeignPages, readable_by_pages
from fairlead_runtime.front.drain import CloseWhileDraining, Drain
from fairlead_runtime.front.key_file import KeyRing
from fairlead_runtime.front.limits import PromptPool
from fairlead_runtime.front.port import HeadAsGet
from fairlead_runtime.front.strict_body import check_model

DOCUMENT = "openapi.json"  # of the public port, beside this module; scripts/make_openapi.py


def public_app(state: ServerState, pool: PromptPool, keys: KeyRing | None = None) -> ASGIApp:
    """The public port: all routes but the probes and the page need one of ``keys``."""
    app = _bare(elsewhere.PUBLIC_PORT)
    probes = Probes(state)
    document = (files(__package__) / DOCUMENT).read_bytes()

    def names() -> tuple[str, ...]:
        return state.name, *state.loaded().rules.aliases

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(state, name) for name in names()]})

    async def model(name: str) -> Response:
        check_model(name, *names())
        return JSONResponse(_model(state, name))

    async def show_version() -> Response:
        return JSONResponse({"version": version("fairlead")})

    async def show_document() -> Response:
        return Response(document, media_type="application/json")

    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"])  # names may have slashes
    app.add_api_route("/version", show_version, methods=["GET"])
    app.add_api_route("/openapi.json", show_document, methods=["GET"])
    if state.public_metrics:
        app.add_api_route("/metrics", functools.partial(public_metrics, state), methods=["GET"])
    if state.page:
        app.add_api_route(PAGE, Page(CHAT_PAGE).__call__, methods=["GET"])
        app.add_api_route(LIVE, LivePicture(state).__call__, methods=["GET"])
    tokens = TokenizeRoutes(state, pool)
    app.router.routes.append(Route("/tokenize", tokens.tokenize, methods=["POST"]))
    app.router.routes.append(Route("/detokenize", tokens.detokenize, methods=["POST"]))
    app.add_api_route("/tokenizer_info", tokens.info, methods=["GET"])
    count = Route("/v1/messages/count_tokens", tokens.count, methods=["POST"])
    app.router.routes.append(count)
    by_prompt: dict[str, ASGIApp] = {}
    for path, endpoint, prompt in (
        ("/v1/chat/completions", CHAT, "messages"),
        ("/v1/completions", COMPLETIONS, "prompt"),
        ("/v1/responses", RESPONSES, "input"),
        ("/v1/messages", MESSAGES, "system"),
    ):
        route: ASGIApp = EndpointHandler(state, endpoint, pool)
        if state.tracing is not None:
            route = Traced(route, state.tracing)
        by_prompt[prompt] = route
        app.router.routes.append(Route(path, route, methods=["POST"]))
    invocations = Invocations(state, pool, by_prompt)
    app.router.routes.append(Route("/invocations", invocations, methods=["POST"]))
    app.add_api_route("/healthz", probes.healthz, methods=["GET"])
    for path in READINESS:
        app.add_api_route(path, probes.readyz, methods=["GET"])
    app.add_api_route("/ping", probes.readyz, methods=["POST"])  # as SageMaker's containers have it
    guarded = AuthMiddleware(HeadAsGet(app), keys, page=state.page)
    outer: ASGIApp = CloseWhileDraining(guarded, state)
    # Outside the keys: a browser's preflight has none, and a page may read a refusal.
    outer = readable_by_pages(outer, state.cors_origin)
    return AccessLogMiddleware(outer, port=elsewhere.PUBLIC_PORT)


def admin_app(state: ServerState, drain: Drain) -> ASGIApp:
    """The admin port. It needs no key: a network policy must guard it, and against the pages that a
    browser shows, which are inside that, it does so itself.
    """
    app = _bare(elsewhere.ADMIN_PORT)
    admin, probes = Admin(state, drain), Probes(state)
    app.add_api_route("/", Page(WATCH, state.name).__call__, methods=["GET"])
    app.add_api_route("/metrics", functools.partial(metrics, state), methods=["GET"])
    app.add_api_route("/healthz", probes.healthz, methods=["GET"])
    for path in READINESS:
        app.add_api_route(path, probes.readyz, methods=["GET"])
    app.add_api_route("/drain", admin.drain, methods=["POST"])
    app.add_api_route("/drain", admin.undo_drain, methods=["DELETE"])
    app.add_api_route("/canary", admin.canary, methods=["POST"])
    app.add_api_route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"])
    app.add_api_route("/model/config.json", admin.model_config, methods=["GET"])
    app.add_api_route("/debug/startup", admin.startup, methods=["GET"])
    app.add_api_route("/debug/memory", admin.memory, methods=["GET"])
    app.add_api_route("/debug/requests", admin.requests, methods=["GET"])
    app.add_api_route("/debug/cache", admin.cache, methods=["GET"])
    return AccessLogMiddleware(ForeignPages(HeadAsGet(app)), port=elsewhere.ADMIN_PORT)


def _bare(port: str) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for kind, handler in errors.HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, functools.partial(elsewhere.refuse, port=port))
    return app


async def _on_validation(request: Request, _error: Exception) -> Response:
    return errors.ApiError(400, "the request is not valid").response_to(request.scope)


def _model(state: ServerState, name: str) -> dict[str, object]:
    backend = state.loaded()
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "fairlead",
        "root": state.source or state.name,
        "parent": None,
        "max_model_len": backend.service.max_model_len,
        "sampling_defaults": dict(backend.rules.sampling),
    }
