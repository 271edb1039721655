"""Chunks of an answer are written as h11 writes them."""

from typing import Any

import h11
import pytest

from fairlead_runtime.front.connection import BoundedConnection

CHUNKED: list[tuple[str, str]] = []
SIZED = [("content-length", "5")]
PIECES = (b"da", b"", b"ta\n")


def sent(connection: Any, answers: list[list[tuple[str, str]]], request: str) -> list[bytes]:
    """What a connection writes for each event of these answers, one request each."""
    written = []
    for headers in answers:
        connection.receive_data(f"{request}\r\nhost: x\r\n\r\n".encode())
        while type(connection.next_event()) is not h11.EndOfMessage:
            pass
        body = PIECES if not request.startswith("HEAD") else (b"",)
        for event in (
            h11.Response(status_code=200, headers=headers),
            *(h11.Data(data=piece) for piece in body),
            h11.EndOfMessage(),
        ):
            written.append(connection.send(event))
        if connection.our_state is h11.DONE:
            connection.start_next_cycle()
    return written


@pytest.mark.parametrize(
    ("request_line", "answers"),
    [
        ("GET / HTTP/1.1", [CHUNKED, SIZED, CHUNKED]),
        ("HEAD / HTTP/1.1", [CHUNKED, SIZED]),
        ("GET / HTTP/1.0", [CHUNKED]),
    ],
)
def test_every_event_is_written_as_h11_writes_it(
    request_line: str, answers: list[list[tuple[str, str]]]
) -> None:
    ours = sent(BoundedConnection(h11.SERVER, 4096), answers, request_line)
    assert ours == sent(h11.Connection(h11.SERVER, 4096), answers, request_line)


def test_a_chunk_after_the_end_is_refused_as_h11_refuses_it() -> None:
    connection = BoundedConnection(h11.SERVER, 4096)
    sent(connection, [CHUNKED], "GET / HTTP/1.1")
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"late"))
