"""The HTTP server of a running `fairlead fetch`: its progress, and the model's config.json as soon
as that is downloaded.

Owns four GET routes: /progress, /model/config.json, /healthz, /readyz. Uses http.server rather than
FastAPI because the download blocks its thread: the server needs a thread, not an event loop.
"""

import http.server
import json
import threading
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fairlead_runtime.hub.fetch import Progress
from fairlead_runtime.models.files import CONFIG
from fairlead_runtime.settings import preflight

BACKLOG = 16
IDLE_SECONDS = 10  # a connection that sends nothing for this long is closed


class FetchServer:
    """Serves while its ``with`` block runs. The download calls ``report``, from any thread."""

    def __init__(self, model: str, host: str, port: int) -> None:
        self.model = model
        self.progress = Progress(0, 0)
        handler = type("_BoundHandler", (_Handler,), {"owner": self})
        listener = preflight.listen("admin_port", host, port, BACKLOG)
        self._server = http.server.ThreadingHTTPServer(
            (host, port), handler, bind_and_activate=False
        )
        self._server.socket.close()
        self._server.socket = listener
        self.port: int = listener.getsockname()[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="fetch-admin",
            daemon=True,
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def report(self, progress: Progress) -> None:
        self.progress = progress

    def set_path(self, path: Path) -> None:
        """Show config.json of the model in ``path``, for sources that need no download."""
        self.progress = Progress(self.progress.done, self.progress.total, path)

    def answer(self, route: str) -> tuple[HTTPStatus, bytes]:
        """Status and JSON body of one route."""
        now = self.progress
        if route == "/progress":
            percent = 100 * now.done // now.total if now.total else 0
            return _json(
                {
                    "model": self.model,
                    "done_bytes": now.done,
                    "total_bytes": now.total,
                    "percent": percent,
                }
            )
        if route == "/model/config.json" and now.path is not None and (now.path / CONFIG).is_file():
            return HTTPStatus.OK, (now.path / CONFIG).read_bytes()
        if route == "/healthz":
            return _json({"status": "fetching"})
        if route == "/readyz":
            return _json({"status": "fetching"}, HTTPStatus.SERVICE_UNAVAILABLE)
        return _json({"error": "not found, or not downloaded yet"}, HTTPStatus.NOT_FOUND)


def _json(value: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> tuple[HTTPStatus, bytes]:
    return status, json.dumps(value).encode()


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: FetchServer
    timeout = IDLE_SECONDS
    server_version = "fairlead"
    sys_version = ""

    def do_GET(self) -> None:
        status, body = self.owner.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Log nothing: probes come every few seconds."""
