"""The operator's probe port: /healthz, /readyz and /metrics, served by a thread of its own.

The thread answers even when the event loop hangs; the probes then fail.
"""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from fairlead_runtime.settings.listening import listen_on_every_address

BACKLOG = 16  # connections that wait to be accepted
STALE_SECONDS = 30.0


class Health:
    """The state of the event loop, which reports that it runs (``beat``) and has listed the cluster
    (``ready``).
    """

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry, self._clock = registry, clock
        self._beat = clock()
        self.ready = False

    def beat(self) -> None:
        self._beat = self._clock()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body for a path. The probes do not fail when the API server is
        unreachable: a restart would not help.
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
                f"the event loop has not run for {silence:.0f} s\n".encode(),
            )
        if path == "/readyz" and not self.ready:
            return 503, "text/plain", b"the cluster has not been listed yet\n"
        return 200, "text/plain", b"ok\n"


def serve(health: Health, port: int) -> ThreadingHTTPServer:
    """Listen on ``port`` of every address, IPv6 and IPv4, until ``shutdown`` is called on the
    result. Raises OSError.
    """

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
            """Log no probes."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore clients that disconnect early; the default prints a traceback between the JSON
            lines.
            """

    server = Server(("", port), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listen_on_every_address(port, BACKLOG)
    server.server_address = server.socket.getsockname()
    server.daemon_threads = True
    # How soon the process ends after a signal: it looks for the end so often.
    threading.Thread(target=server.serve_forever, args=(0.05,), name="health", daemon=True).start()
    return server
