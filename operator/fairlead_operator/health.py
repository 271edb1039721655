"""The operator's probe port: /healthz, /readyz and /metrics, from a thread of its own.

Owns the answers only. Its thread answers even when the event loop hangs, and then says so.
"""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

STALE_SECONDS = 30.0


class Health:
    """Told by the event loop that it lives (``beat``) and that it knows the cluster (``ready``)."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry, self._clock = registry, clock
        self._beat = clock()
        self.ready = False

    def beat(self) -> None:
        self._beat = self._clock()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body of a path. The API server being away is no reason to be
        restarted.
        """
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path not in {"/healthz", "/readyz"}:
            return 404, "text/plain", b"not found\n"
        silence = self._clock() - self._beat
        if silence > STALE_SECONDS:
            return (
                503,
                "text/plain",
                f"the event loop has not turned for {silence:.0f} s\n".encode(),
            )
        if path == "/readyz" and not self.ready:
            return 503, "text/plain", b"the cluster has not been listed yet\n"
        return 200, "text/plain", b"ok\n"


def serve(health: Health, port: int) -> ThreadingHTTPServer:
    """Answer on a port of every address until ``shutdown`` is called on the result."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            code, kind, body = health.answer(self.path.split("?")[0])
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Probes are no news."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that leave early are no news either; the default prints a traceback between
            the JSON lines.
            """

    server = Server(("", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server
