"""Thousands of played pods in one small process: the runtime's admin port on each one's address.

``ManyPods`` starts the process and reads what it counted. The process itself does as little as a
server can, so that a test on a small machine measures the operator: one event loop, answers made in
advance, no logs. It can fall silent: then it accepts connections and never answers, like pods whose
event loop hangs.
"""

import asyncio
import ipaddress
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

from cluster.harness.controlplane import end, end_with_parent
from cluster.harness.idle_pod import BLOCKS, report
from fairlead_operator.resource.kinds import ADMIN_PORT
from fairlead_runtime.serving.metrics import EngineMetrics


class Seen(TypedDict):
    """Requests of one pod since the last ``reset``; ``gap``: the longest time between two scrapes
    that were answered, in seconds.
    """

    scrapes: int
    canaries: int
    gap: float


@dataclass(slots=True)
class ManyPods:
    """The played pods on the first ``count`` addresses of ``network``."""

    process: "subprocess.Popen[bytes]"

    def tell(self, command: str) -> Any:
        """``reset``, ``silent``, ``answer`` or ``report``; the process' answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def seen(self) -> dict[str, Seen]:
        """By address, of pods that were asked at least once since the last ``reset``."""
        report: dict[str, Seen] = self.tell("report")
        return report


@contextmanager
def many_pods(network: str, count: int, served_name: str, running: int = 0) -> Iterator[ManyPods]:
    """Pods that run ``running`` requests each. Raises CalledProcessError where no route to the
    network can be added (it needs root).
    """
    route = ["local", network, "dev", "lo"]
    subprocess.run(["ip", "route", "replace", *route], check=True, capture_output=True)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, network, str(count), served_name, str(running)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=end_with_parent(os.getpid()),  # noqa: PLW1509 - two system calls, no lock taken
        )
        pods = ManyPods(process)
        try:
            pods.tell("reset")  # answered once it listens
            yield pods
        finally:
            end(process, patience=3)
    finally:
        subprocess.run(["ip", "route", "del", *route], check=False)


# -- the process


class _Pods:
    """The counts and the answers of all pods."""

    def __init__(self, served_name: str, running: int) -> None:
        self.silent = False
        self.counts: dict[str, Seen] = {}
        self._last: dict[str, float] = {}  # the last answered scrape
        memory = {"numBlocks": BLOCKS, "concurrentTokens": BLOCKS * 16}
        self._answers = {
            b"GET /metrics": _answer(EngineMetrics(served_name).exposition(report(running, 0))),
            b"POST /canary": _answer(b'{"token": 1}'),
            b"GET /debug/memory": _answer(json.dumps(memory).encode()),
        }
        self._unknown = _answer(b"{}", b"404 Not Found")

    def answer(self, address: str, head: bytes) -> bytes:
        """The answer to a request, b"" for none."""
        request = head[: head.find(b" HTTP/")]
        if request == b"GET /metrics":
            seen = self._seen(address)
            if self.silent:
                return b""
            now = time.monotonic()
            seen["scrapes"] += 1
            seen["gap"] = max(seen["gap"], now - self._last.get(address, now))
            self._last[address] = now
        elif self.silent:
            return b""
        elif request == b"POST /canary":
            self._seen(address)["canaries"] += 1
        return self._answers.get(request, self._unknown)

    def _seen(self, address: str) -> Seen:
        return self.counts.setdefault(address, {"scrapes": 0, "canaries": 0, "gap": 0.0})

    def do(self, command: str) -> Any:
        if command == "reset":
            self.counts.clear()
            self._last.clear()
        elif command in {"silent", "answer"}:
            self.silent = command == "silent"
        return self.counts


class _Connection(asyncio.Protocol):
    def __init__(self, pods: _Pods) -> None:
        self._pods, self._head = pods, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._address: str = transport.get_extra_info("sockname")[0]

    def data_received(self, data: bytes) -> None:
        self._head += data
        if self._head.endswith(b"\r\n\r\n"):  # no request has a body
            if answer := self._pods.answer(self._address, self._head):
                self._transport.write(answer)
            self._head = b""


def _answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


async def _serve(network: str, count: int, served_name: str, running: int) -> None:
    loop, pods = asyncio.get_running_loop(), _Pods(served_name, running)
    # One listener each, not one on all: pods of parallel runs use the same port on theirs.
    for address in itertools.islice(ipaddress.ip_network(network), count):
        await loop.create_server(lambda: _Connection(pods), str(address), ADMIN_PORT)
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        print(json.dumps(pods.do(line.decode().strip())), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
