"""A proxy between the operator and the API server that records calls and injects faults.

Plain HTTP in, TLS out; the caller's own credentials pass through. Owns no policy: a test installs
``choose_fault``, which the proxy's thread calls for every request; "pass" injects none. Watches are
passed on as they stream.
"""

import asyncio
import json
import random
import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

from cluster.harness.controlplane import ControlPlane, free_ports

Fault = Literal[
    "pass",
    "409",
    "429",
    "500",
    "503",
    "401",
    "410",
    "reset",
    "hang",
    "cut",
    "drop-events",
    "delay-events",
    "lost-answer",
    "stale",
]
# The kinds of error that any call may meet.
ERRORS: tuple[Fault, ...] = ("409", "429", "500", "503", "401", "410", "reset", "hang", "cut")
STATUS = {
    "409": "Conflict",
    "429": "TooManyRequests",
    "500": "InternalError",
    "503": "ServiceUnavailable",
    "401": "Unauthorized",
    "410": "Expired",
}
_PATH = re.compile(
    r"^/(?:api|apis)/(?:[a-z0-9.-]+/)?v[0-9a-z]+(?:/namespaces/(?P<ns>[^/?]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/?]+))?(?:/(?P<sub>[a-z]+))?(?:\?(?P<query>.*))?$"
)


@dataclass(frozen=True, slots=True)
class Call:
    """One request: its time, its verb as the audit log names it, and its object."""

    at: float
    verb: str
    plural: str
    namespace: str
    name: str
    sub: str
    path: str
    resource: str = ""  # of a write: the name of the resource that the object belongs to

    @property
    def writes(self) -> bool:
        return self.verb in {"create", "update", "patch", "delete"}

    @property
    def about_objects(self) -> bool:
        """Anything but the Lease and discovery."""
        return bool(self.plural) and self.plural != "leases"

    @property
    def of_children(self) -> bool:
        return (
            self.writes
            and self.about_objects
            and self.plural not in {"inferencedeployments", "events"}
        )


FaultPolicy = Callable[[Call], Fault]


@dataclass(slots=True)
class FaultProxy:
    """``with FaultProxy(plane) as proxy``; ``proxy.url`` is the operator's server address."""

    plane: ControlPlane
    choose_fault: FaultPolicy = lambda _: "pass"
    calls: list[Call] = field(default_factory=list)
    port: int = 0
    unreachable: bool = False  # the API server answers no request
    on_lost_answer: Callable[[], None] = lambda: (
        None
    )  # called after the request of a lost answer took effect
    latency: float = 0.0  # seconds added to every request
    hang_seconds: float = 60.0
    delay_seconds: float = 5.0
    rng: random.Random = field(
        default_factory=lambda: random.Random(0)
    )  # chooses the old list to replay
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _lists: dict[str, list[bytes]] = field(default_factory=dict)  # answers of each list, to replay
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _context: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    def __enter__(self) -> Self:
        self.port = free_ports(1)[0]
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="faultproxy", daemon=True
        )
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        assert self._thread is not None
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut_connections(self) -> None:
        """Reset every open connection, watches too."""
        self._loop.call_soon_threadsafe(self._reset_all)

    def _reset_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._context = ssl.create_default_context(cafile=str(self.plane.ca))
        self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        started.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the operator; its requests run one after the other."""
        self._open.add(writer)
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side closed, or the test is over: the other side notices
        finally:
            self._open.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; returns whether the connection can take another."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_length(head))
        method, path = head.split(b" ", 2)[:2]
        call = classify(method.decode(), path.decode(), body)
        self.calls.append(call)
        await asyncio.sleep(self.latency)
        fault = "reset" if self.unreachable else self.choose_fault(call)
        if fault in STATUS:
            writer.write(_refusal(fault))
            await writer.drain()
            return True
        if fault == "hang":
            await asyncio.sleep(self.hang_seconds)
        if fault in {"hang", "reset"}:
            writer.transport.abort()
            return False
        upstream, sink = await asyncio.open_connection(
            "127.0.0.1", self.plane.port, ssl=self._context
        )
        self._open.add(sink)
        try:
            lines = [
                line
                for line in head.split(b"\r\n")[:-2]
                if not line.lower().startswith(b"connection:")
            ]
            sink.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            await sink.drain()
            if call.verb == "watch":
                await self._stream(upstream, fault, writer)
            else:
                await self._answer(upstream, call, fault, writer)
        finally:
            self._open.discard(sink)
            sink.transport.abort()
        return False

    async def _answer(
        self, upstream: asyncio.StreamReader, call: Call, fault: Fault, writer: asyncio.StreamWriter
    ) -> None:
        """Send the answer, or what the fault leaves of it; the request itself took effect."""
        answer = await upstream.read()
        if fault == "lost-answer":
            self.on_lost_answer()
            writer.transport.abort()
            return
        if call.verb == "list" and answer.startswith(b"HTTP/1.1 200"):
            seen = self._lists.setdefault(call.path, [])
            seen.append(answer)
            answer = self.rng.choice(seen) if fault == "stale" else answer
        writer.write(answer[: len(answer) // 2] if fault == "cut" else answer)
        await writer.drain()

    async def _stream(
        self, upstream: asyncio.StreamReader, fault: Fault, writer: asyncio.StreamWriter
    ) -> None:
        """Pass a watch on. "cut" ends it in the middle of its second part, "drop-events" drops all
        but the first.
        """
        parts = 0
        while part := await upstream.read(65536):
            parts += 1
            if fault == "drop-events" and parts > 1:
                continue
            if fault == "delay-events" and parts > 1:
                await asyncio.sleep(self.delay_seconds)
            writer.write(part[: len(part) // 2] if fault == "cut" and parts > 1 else part)
            await writer.drain()
            if fault == "cut" and parts > 1:
                return


def classify(method: str, path: str, body: bytes = b"") -> Call:
    now = time.monotonic()
    match = _PATH.match(path)
    if match is None:
        return Call(now, "discover", "", "", "", "", path)
    name, query = match["name"] or "", (match["query"] or "").lower()
    read_verb = (
        "watch" if "watch=true" in query or "watch=1" in query else "get" if name else "list"
    )
    verbs = {
        "GET": read_verb,
        "POST": "create",
        "PUT": "update",
        "PATCH": "patch",
        "DELETE": "delete",
    }
    resource = name
    if method == "POST":
        # An Event is named after its resource: name.hash.
        resource = str(json.loads(body)["metadata"]["name"]).split(".")[0]
    return Call(
        now,
        verbs.get(method, method),
        match["plural"],
        match["ns"] or "",
        name,
        match["sub"] or "",
        path,
        resource,
    )


def _length(head: bytes) -> int:
    match = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return int(match[1]) if match else 0


def _refusal(fault: str) -> bytes:
    body = json.dumps(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": STATUS[fault],
            "message": "a fault of the test",
            "code": int(fault),
        }
    ).encode()
    retry = b"Retry-After: 1\r\n" if fault == "429" else b""
    return (
        f"HTTP/1.1 {fault} {STATUS[fault]}\r\nContent-Type: application/json\r\n".encode()
        + f"Content-Length: {len(body)}\r\n".encode()
        + retry
        + b"\r\n"
        + body
    )
