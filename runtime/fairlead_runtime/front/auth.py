"""API keys: which requests are allowed, and whose they are.

Owns the decision on ``scope["path"]``, made before the body is read. Every path of the public port,
existing or not, needs a key, except the probes and, where it is served, the page to chat.
"""

from contextlib import ExitStack

from starlette.types import ASGIApp, Receive, Scope, Send

from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.front.key_file import MAX_KEY, Key, KeyRing

# /readyz and its names on other servers, for load balancers that are configured for those.
READINESS = ("/readyz", "/health", "/ping")
OPEN_PATHS = frozenset({"/healthz", *READINESS})
PAGE, LIVE = "/", "/page/live"  # the page to chat, and the picture that it asks for each second
KEY = "fairlead.key"  # the scope's entry for the caller's Key; absent without keys


class AuthMiddleware:
    """Pure ASGI: refuses requests to the public app without a valid key, or beyond the limits of
    their key. Without a key ring it refuses none. ``page``: the port has the page, which is open,
    and its picture, which needs a key and does not count in the key's limits.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing | None, *, page: bool = False) -> None:
        self._app = app
        self._keys = keys
        self._open = OPEN_PATHS | {PAGE} if page else OPEN_PATHS
        self._uncounted = {LIVE} if page else set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys is None or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        key = _key(self._keys, scope)
        if key is None:
            self._keys.unauthorized += 1
            await _unauthorized().response_to(scope)(scope, receive, send)
            return
        scope[KEY] = key
        if scope["path"] in self._uncounted:
            await self._app(scope, receive, send)
            return
        with ExitStack() as running:
            try:
                running.enter_context(key.usage.request(key.limits))
            except ApiError as refusal:
                self._keys.limited += 1
                await refusal.response_to(scope)(scope, receive, send)
                return
            await self._app(scope, receive, send)


def _key(keys: KeyRing, scope: Scope) -> Key | None:
    """The key of the bearer token, else of ``x-api-key``, where Anthropic's clients send it."""
    scheme, _, credential = _header(scope, b"authorization").partition(b" ")
    bearer = credential if scheme.lower() == b"bearer" else b""
    # Always compare both, so that a malformed header takes as long as a wrong key.
    found = [_found(keys, text) for text in (bearer, _header(scope, b"x-api-key"))]
    return next((key for key in found if key is not None), None)


def _header(scope: Scope, wanted: bytes) -> bytes:
    """The header's value; empty where it comes twice."""
    values = [value for name, value in scope["headers"] if name == wanted]
    return values[0] if len(values) == 1 else b""


def _found(keys: KeyRing, sent: bytes) -> Key | None:
    text = sent.strip()
    key = keys.find(text[:MAX_KEY])
    return key if text and len(text) <= MAX_KEY else None


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "this server needs an API key: send it as 'Authorization: Bearer KEY' or as "
        "'x-api-key: KEY'",
        headers={"www-authenticate": "Bearer"},
    )


def key_of(scope: Scope) -> Key | None:
    """The caller's key; None without keys."""
    key: Key | None = scope.get(KEY)
    return key


def tenant_of(scope: Scope) -> str | None:
    """The caller's tenant; None without keys."""
    key = key_of(scope)
    return None if key is None else key.tenant
