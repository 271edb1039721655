"""Limits on one connection, below any application: uvicorn's h11 protocol with deadlines.

Owns the limits on header bytes and count, on chunks, on the time for a header, on a peer that does
not read, and on the number of connections. uvicorn itself never times out an incomplete header, and
closes a connection so that a client that is still sending gets a reset instead of the answer.
"""

import asyncio
import re
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fairlead_runtime.front.errors import ApiError

HEADER_BYTES = 32 * 1024
HEADER_COUNT = 100
CHUNKS = 10_000  # of one chunked body
HEADER_SECONDS = 10.0
WRITE_STALL_SECONDS = 60.0
LINGER_SECONDS = 2.0  # after an answer to an unread body, discard further input for this long
# Longer than pools of clients and proxies keep a connection (openai-python 5 s, aiohttp 15 s, nginx
# 60 s): else a request can be on its way on a connection that the server closes.
KEEP_ALIVE_SECONDS = 75

_OPTIONS = (
    # asyncio sets it only on sockets created with an explicit protocol number; without it every
    # event waits 40 ms for the acknowledgement of the previous one.
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # Let the kernel detect peers that vanished without closing the connection.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", 30),
            ("TCP_KEEPINTVL", 10),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 60_000),
        )
        if hasattr(socket, name)
    ),
)


_ABSOLUTE = re.compile(rb"https?://[^/?#]+([/?].*)?", re.IGNORECASE)
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"


class BoundedConnection(h11.Connection):
    """h11 with limits on parsed events; exceeding one is a protocol error with its own status."""

    def __init__(self, our_role: type[h11.SERVER], max_incomplete_event_size: int) -> None:
        super().__init__(our_role, max_incomplete_event_size)
        self._chunks = 0
        self._answers_in_chunks = False

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            _check_request(event)
            event = _in_origin_form(event)
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > CHUNKS:
                raise h11.RemoteProtocolError(f"the body has more than {CHUNKS} chunks", 413)
        return event

    def send(self, event: Any) -> Any:
        """Send as h11 does; a chunk of an answer, the hot path, without its state machine, which a
        chunk does not change.
        """
        if type(event) is h11.Data and self._answers_in_chunks and event.data:
            if self.our_state is h11.SEND_BODY:
                return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        sent = super().send(event)
        if type(event) is h11.Response:
            self._answers_in_chunks = _CHUNKED in sent.lower()
        return sent


def _check_request(event: h11.Request) -> None:
    if event.http_version not in {b"1.0", b"1.1"}:
        raise h11.RemoteProtocolError("the server supports HTTP/1 only")
    names = {name for name, _ in event.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        # Request smuggling: a proxy in front may have used the other header and so disagree about
        # where the next request begins.
        raise h11.RemoteProtocolError("a body has either a length or chunks, not both")
    size = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
    if size > HEADER_BYTES or len(event.headers) > HEADER_COUNT:
        raise h11.RemoteProtocolError(
            f"the header has more than {HEADER_BYTES} bytes or {HEADER_COUNT} fields", 431
        )


def _in_origin_form(event: h11.Request) -> h11.Request:
    """The request with its path and query as the target, for one in absolute form: a server must
    take those that clients send through proxies (RFC 9112, 3.2.2).
    """
    absolute = _ABSOLUTE.fullmatch(event.target)
    if absolute is None:
        return event
    rest = absolute[1] or b""
    target = rest if rest.startswith(b"/") else b"/" + rest
    return h11.Request(
        method=event.method, headers=event.headers, target=target, http_version=event.http_version
    )


class LingeringTransport:
    """A transport whose ``close`` first lets a client that is still sending read the answer."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self._close = close
        self._closing = False
        self.write = transport.write  # bound once: it is the hot path

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._close()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GuardedProtocol(H11Protocol):
    """One connection. ``max_connections`` is set by ``protocol_class``."""

    max_connections = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = BoundedConnection(h11.SERVER, HEADER_BYTES)
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._raw: asyncio.Transport

    # -- events of a connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        _set_options(transport)
        super().connection_made(LingeringTransport(transport, self._close))  # type: ignore[arg-type]
        if len(self.connections) > self.max_connections:
            idle = idle_connections(self.connections)
            if not idle:
                self._refuse(
                    ApiError(
                        503,
                        f"the server has its maximum of {self.max_connections} connections; retry",
                        code="too_many_connections",
                        headers={"retry-after": "1"},
                    )
                )
                return
            idle[0].timeout_keep_alive_handler()  # it makes room
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._stall_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_header()
        else:
            self._header_received()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.conn.their_state is h11.SEND_BODY:
            # Answered without reading the body: the start of a next request is unknown.
            self.transport.close()

    # -- deadlines

    def _await_header(self) -> None:
        if self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._header_timed_out)

    def _header_received(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_timed_out(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(ApiError(408, f"the header did not arrive within {HEADER_SECONDS:g} s"))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(WRITE_STALL_SECONDS, self._raw.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # -- endings

    @property
    def idle_until(self) -> float | None:
        """The time at which the connection will be closed, on the loop's clock, if it waits for
        another request; None before its first answer, and while a request arrives or is answered.
        """
        timer = self.timeout_keep_alive_task
        return None if timer is None or self.transport.is_closing() else timer.when()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """Uvicorn calls it while it handles h11's error, which has the status."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status not in {413, 431}:
            status, text = 400, "the request is not valid HTTP"
        else:
            text = str(error)
        self._refuse(ApiError(status, text, code="invalid_http" if status == 400 else None))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application and close; only close when HTTP allows no answer."""
        self._header_received()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            response = error.response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=error.status, headers=headers)
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _close(self) -> None:
        """Close at once when the client has sent its whole request; else linger, so that a reset
        does not discard the answer.
        """
        self._header_received()
        unread = self.conn.their_state in {h11.SEND_BODY, h11.ERROR}
        if unread and not self._raw.is_closing():
            if self._raw.can_write_eof():  # not with TLS
                self._raw.write_eof()
            self._raw.resume_reading()
            self._linger_timer = self.loop.call_later(LINGER_SECONDS, self._raw.close)
        else:
            self._raw.close()


def idle_connections(connections: Iterable[object]) -> list[GuardedProtocol]:
    """Connections that wait for another request, the one that is idle for longest first."""
    guarded = [connection for connection in connections if isinstance(connection, GuardedProtocol)]
    idle = [connection for connection in guarded if connection.idle_until is not None]
    return sorted(idle, key=lambda connection: connection.idle_until or 0.0)


def protocol_class(max_connections: int) -> type[GuardedProtocol]:
    """A protocol class with its own limit on connections: uvicorn takes a class."""
    return type("GuardedProtocol", (GuardedProtocol,), {"max_connections": max_connections})


def _set_options(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    for level, option, value in _OPTIONS:
        sock.setsockopt(level, option, value)
