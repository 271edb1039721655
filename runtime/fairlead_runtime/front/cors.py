"""Pages of other origins: which may read answers of a public port, and that none may change what an
admin port serves.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from fairlead_runtime.front.errors import ApiError

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# What a page may send anywhere without a preflight; these routes take no body.
_FORMS = frozenset({"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
# The public DNS has no such names, so no stranger's page can have one (RFC 6761, RFC 6762).
_PRIVATE_DOMAINS = ("localhost", "local", "internal", "svc", "test")


def readable_by_pages(app: ASGIApp, origin: str) -> ASGIApp:
    """``app``, whose answers pages of ``origin`` may read; empty: no other's pages."""
    if not origin:
        return app
    return CORSMiddleware(
        app,
        allow_origins=[origin],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after", "fairlead-ignored-fields"],
    )


class ForeignPages:
    """Pure ASGI: refuses, with 403, what a page of another origin sends to an application without
    keys, but for methods that change nothing.

    A browser says whose page asks (``Sec-Fetch-Site``, ``Origin``). A page whose own name has been
    made to point here (DNS rebinding) is of the same origin, so what a browser sends must also
    name the server as no stranger can: by an address, or by a name that is not in the public DNS.
    Programs say neither and are let through, whatever name they use. HTML forms of browsers that
    say neither are known by their content type.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = "" if scope["method"] in _SAFE_METHODS else _foreign(Headers(scope=scope))
        if fault:
            refusal = ApiError(403, f"a web page may not send this: {fault}")
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _foreign(headers: Headers) -> str:
    """Why a request seems to be of a foreign page; "" where it does not."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _FORMS:
        return "its Content-Type is that of an HTML form; send no body"
    sites, origins = headers.getlist("sec-fetch-site"), headers.getlist("origin")
    if any(site not in {"same-origin", "none"} for site in sites):
        return "Sec-Fetch-Site is that of another site"
    host = headers.get("host", "")
    if any(_host_of(origin) != host.lower() for origin in origins):
        return "Origin is another one than Host"
    if (sites or origins) and not _is_private(host):
        return "Host is a name of the public DNS; use the address, or port-forward to localhost"
    return ""


def _host_of(origin: str) -> str | None:
    """Host and port of an origin; None for ``null`` and what is no origin."""
    try:
        return urlsplit(origin.lower()).netloc or None
    except ValueError:
        return None


def _is_private(host: str) -> bool:
    """Whether no stranger can have a page under this name: an address, a name without a dot, one
    of a domain that is not public.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        labels = name.removesuffix(".").split(".")
        return bool(name) and (len(labels) == 1 or labels[-1] in _PRIVATE_DOMAINS)
    return True
