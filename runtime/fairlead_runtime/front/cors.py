"""Cross-origin resource sharing: which pages of other origins may read answers of a public port."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp


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
