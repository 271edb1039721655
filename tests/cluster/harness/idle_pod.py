"""A pod's process that computes nothing: the runtime's admin port, with a load that the test sets.

Its metrics are the runtime's own exposition. It takes the arguments of ``fairlead``: ``serve MODEL
--host=… --served-name=…``. ``STANDIN_LOAD`` names a JSON file {address: [running, waiting]}, read
at every scrape; an address not in it is idle.
"""

import http.server
import json
import os
import signal
import sys
from pathlib import Path

from fairlead_runtime.outputs import Counters, EngineSnapshot
from fairlead_runtime.scheduling.stats import SchedulerStats, StepStats
from fairlead_runtime.serving.measurements import EngineReport, RequestMetrics
from fairlead_runtime.serving.metrics import EngineMetrics

BLOCKS = 1000


def report(running: int, waiting: int) -> EngineReport:
    """An engine with these requests, each running one in its own block."""
    scheduler = SchedulerStats(
        running=running,
        prefilling=0,
        waiting=waiting,
        offloaded=0,
        units=BLOCKS,
        free=BLOCKS - running,
        cached=0,
        used=running,
        preemptions=0,
        preempted_tokens=0,
        offloads=0,
        prefix_queries=0,
        prefix_hits=0,
        last=StepStats(),
    )
    engine = EngineSnapshot(scheduler, Counters(), 0, BLOCKS, 16, 4096)
    return EngineReport(engine, RequestMetrics().read())


class Admin(http.server.BaseHTTPRequestHandler):
    address: str
    stats: EngineMetrics

    def do_GET(self) -> None:
        if self.path in {"/readyz", "/healthz"}:
            self._answer(200, b"{}")
        elif self.path == "/metrics":
            loads = json.loads(Path(os.environ["STANDIN_LOAD"]).read_text())
            self._answer(200, self.stats.exposition(report(*loads.get(self.address, (0, 0)))))
        else:
            self._answer(404, b"{}")

    def do_POST(self) -> None:
        self._answer(200, b'{"token": 1}') if self.path == "/canary" else self._answer(404, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: probes come several times a second."""


def main() -> None:
    flags = dict(
        a.removeprefix("--").split("=", 1) for a in sys.argv if a.startswith("--") and "=" in a
    )
    Admin.address, Admin.stats = flags["host"], EngineMetrics(flags["served-name"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    http.server.ThreadingHTTPServer((flags["host"], 9000), Admin).serve_forever()


if __name__ == "__main__":
    main()
