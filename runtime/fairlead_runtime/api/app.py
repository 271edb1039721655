"""The two applications, composed: which routes there are and what stands in front of them.

Owns the composition and nothing else. No documentation routes, no CORS, no static files, no forms,
no websockets: what is not listed here is a 404.
"""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fairlead_runtime.api import errors
from fairlead_runtime.api.access_log import Observed
from fairlead_runtime.api.admin import Admin
from fairlead_runtime.api.auth import Authenticated, KeyRing, Salter
from fairlead_runtime.api.completions import CHAT, COMPLETIONS, Generate
from fairlead_runtime.api.health import Probes
from fairlead_runtime.api.limits import Pool
from fairlead_runtime.api.state import Face
from fairlead_runtime.outputs import ServiceError
from fairlead_runtime.request import RequestError


def public_app(face: Face, pool: Pool, keys: KeyRing | None = None) -> ASGIApp:
    """The public port: OpenAI's routes behind ``keys``, probes open."""
    app = _bare()
    salter, probes = Salter(), Probes(face)

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(face)]})

    app.add_api_route("/v1/models", models, methods=["GET"])
    app.router.routes.append(
        Route("/v1/completions", Generate(face, COMPLETIONS, pool, salter), methods=["POST"])
    )
    app.router.routes.append(
        Route("/v1/chat/completions", Generate(face, CHAT, pool, salter), methods=["POST"])
    )
    app.add_api_route("/healthz", probes.healthz, methods=["GET"])
    app.add_api_route("/readyz", probes.readyz, methods=["GET"])
    return Observed(Authenticated(app, keys), port="public")


def admin_app(face: Face) -> ASGIApp:
    """The admin port, for the pod's own network policy to guard: it asks for no key."""
    app = _bare()
    admin, probes = Admin(face), Probes(face)
    app.add_api_route("/metrics", admin.metrics, methods=["GET"])
    app.add_api_route("/healthz", probes.healthz, methods=["GET"])
    app.add_api_route("/readyz", probes.readyz, methods=["GET"])
    app.add_api_route("/drain", admin.drain, methods=["POST"])
    app.add_api_route("/canary", admin.canary, methods=["POST"])
    app.add_api_route("/model/config.json", admin.model_config, methods=["GET"])
    app.add_api_route("/debug/memory", admin.memory, methods=["GET"])
    app.add_api_route("/debug/requests", admin.requests, methods=["GET"])
    return Observed(app, port="admin")


def _bare() -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for kind in (errors.ApiError, RequestError, ServiceError):
        app.add_exception_handler(kind, _on_known)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(Exception, _on_unforeseen)
    return app


async def _on_known(_request: Request, error: Exception) -> Response:
    return errors.of(error).response()


async def _on_http(_request: Request, error: Exception) -> Response:
    """What the router itself refuses: an unknown path, a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    told = {
        404: "there is no such route on this port",
        405: "this route does not take that method",
    }
    return errors.ApiError(
        status, told.get(status, "the request is not valid"), headers=headers
    ).response()


async def _on_validation(_request: Request, _error: Exception) -> Response:
    return errors.ApiError(400, "the request is not valid").response()


async def _on_unforeseen(_request: Request, _error: Exception) -> Response:
    """Only the answer: the exception goes on to Observed, which logs where it came from."""
    return errors.internal().response()


def _model(face: Face) -> dict[str, object]:
    service = face.loaded().service
    return {
        "id": face.name,
        "object": "model",
        "created": face.created,
        "owned_by": "fairlead",
        "root": face.source or face.name,
        "parent": None,
        "max_model_len": service.max_model_len,
    }
