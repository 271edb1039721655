"""What a port says about a route or a method that it does not have.

Owns the names that other servers give to our routes, and the words for what this server does not
do. Never echoes a path.
"""

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from fairlead_runtime.front.errors import ApiError

PUBLIC_PORT, ADMIN_PORT = "public", "admin"
ADMIN_PATHS = frozenset(
    {
        "/metrics",
        "/drain",
        "/canary",
        "/reset_prefix_cache",
        "/model/config.json",
        "/debug/startup",
        "/debug/memory",
        "/debug/requests",
        "/debug/cache",
    }
)
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_RESPONSES, _MODELS = "/v1/responses", "/v1/models"
_MESSAGES = "/v1/messages"
PUBLIC_PATHS = frozenset(
    {
        *(_COMPLETIONS, _CHAT, _RESPONSES, _MODELS),
        *(_MESSAGES, "/v1/messages/count_tokens"),
        *("/tokenize", "/detokenize", "/tokenizer_info"),
        *("/invocations", "/openapi.json", "/version"),
    }
)
# By a route of another server, ours in its place.
_OURS = {
    "/generate": _COMPLETIONS,
    "/generate_stream": _COMPLETIONS,
    "/inference/v1/generate": _COMPLETIONS,
    "/api/generate": _COMPLETIONS,
    "/completion": _COMPLETIONS,
    "/completions": _COMPLETIONS,
    "/api/chat": _CHAT,
    "/chat/completions": _CHAT,
    "/chat": _CHAT,
    "/responses": _RESPONSES,
    "/messages": _MESSAGES,
    "/models": _MODELS,
    "/api/tags": _MODELS,
    "/api/ps": _MODELS,
    "/api/show": _MODELS,
    "/info": _MODELS,
    "/server_info": _MODELS,
    "/get_model_info": _MODELS,
    "/get_server_info": _MODELS,
    "/api/version": "/version",
    "/v1/version": "/version",
    "/v1/tokenize": "/tokenize",
    "/apply-template": "/tokenize",
    "/v1/completions/render": "/tokenize",
    "/v1/chat/completions/render": "/tokenize",
    "/v1/detokenize": "/detokenize",
    "/props": "/tokenizer_info",
    "/docs": "/openapi.json",
    "/redoc": "/openapi.json",
    "/swagger.json": "/openapi.json",
    "/v1/metrics": "/metrics",
    "/load": "/metrics",
    "/slots": "/debug/requests",
    "/flush_cache": "/reset_prefix_cache",
    "/v1/health": "/health",
    "/livez": "/healthz",
    "/health_generate": "/canary",
}
# A base URL with one part too many or too few: /v1/v1/models, /openai/chat/completions.
_ENDS = {
    route.removeprefix("/v1"): route
    for route in (_CHAT, _COMPLETIONS, _RESPONSES, _MESSAGES, _MODELS)
}
_NO_VECTORS = "this server generates text: embeddings, scores and rankings are not served for now"
_NO_MEDIA = "this server reads and writes text only"
_NO_LORA = "adapters are not served: merge one into its model and serve that"
_NO_STORE = "nothing is stored here: send the whole conversation with each request"
_NO_SLEEP = "this engine does not sleep: scale the deployment to no pods"
# By a route of another server, or where it ends in a slash by the beginning of some, why not here.
_NOT_SERVED = {
    **dict.fromkeys(
        (
            *("/v1/embeddings", "/embeddings", "/embedding", "/embed", "/api/embed"),
            *("/api/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/reranking"),
            *("/v1/reranking", "/v2/embed", "/score", "/v1/score", "/classify", "/v1/classify"),
            *("/pooling", "/generative_scoring", "/encode"),
        ),
        _NO_VECTORS,
    ),
    **dict.fromkeys(("/v1/audio/", "/v1/images/", "/v1/videos/", "/v1/realtime"), _NO_MEDIA),
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"), _NO_LORA
    ),
    **dict.fromkeys(
        (
            *("/v1/responses/", "/v1/conversations", "/v1/conversations/", "/v1/files"),
            *("/v1/files/", "/v1/batches", "/v1/batches/", "/v1/assistants", "/v1/threads"),
            *("/v1/threads/", "/v1/messages/batches", "/v1/messages/batches/"),
        ),
        _NO_STORE,
    ),
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), _NO_SLEEP),
    "/v1/moderations": "this server moderates nothing",
    "/infill": "filling in the middle is not served: write the model's own marks into a prompt of "
    + _COMPLETIONS,
    "/v1/chat/completions/batch": f"send each chat to {_CHAT}: requests run in batches by "
    "themselves",
    "/": f"it speaks OpenAI's API below /v1: begin with GET {_MODELS} or GET /openapi.json; "
    "--page on shows a page to chat here",
    "/v1": f"/v1 is the base URL of a client, which adds a route such as {_CHAT}",
}


async def refuse(request: Request, error: Exception, port: str) -> Response:
    """Answer the router's own refusals: an unknown path or a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message, headers = "the request is not valid", dict[str, str]()
    if status == 404:
        hint = elsewhere(request.url.path, port)
        message = "this port has no such route" + (f"; {hint}" if hint else "")
    elif status == 405:
        allowed = ", ".join(_allowed_methods(request))
        message, headers = (
            f"this route does not accept that method: use {allowed}",
            {"allow": allowed},
        )
    return ApiError(status, message, headers=headers).response_to(request.scope)


def _allowed_methods(request: Request) -> list[str]:
    routes = request.app.router.routes
    methods = {
        method
        for route in routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods
    }
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


def elsewhere(path: str, port: str) -> str:
    """Where what is asked for at ``path`` is, or why it is nowhere; "" where nobody knows it."""
    path = path.rstrip("/") or "/"
    if path in ADMIN_PATHS | PUBLIC_PATHS:  # of the other port, or with a slash behind it
        return _place(path, port)
    if reason := _reason(path, _NOT_SERVED):
        return reason
    ours = _OURS.get(path) or next((route for route in _ENDS if path.endswith(route)), "")
    return _place(_ENDS.get(ours, ours), port) if ours else ""


def _reason(path: str, reasons: Mapping[str, str]) -> str:
    beginnings = (name for name in reasons if len(name) > 1 and name.endswith("/"))
    known = path if path in reasons else next((b for b in beginnings if path.startswith(b)), "")
    return reasons.get(known, "")


def _place(route: str, port: str) -> str:
    if route == "/metrics" and port == PUBLIC_PORT:
        return "use /metrics of the admin port, or serve with --public-metrics"
    if route in ADMIN_PATHS:
        return f"use {route} of the admin port" if port == PUBLIC_PORT else f"use {route}"
    return f"use {route} of the public port"
