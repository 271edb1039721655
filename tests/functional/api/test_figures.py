"""Figures in seconds, bytes and processor time, and statistics, of real servers: in the long form
only. Other tests hold the same promises by counts and events.
"""

import asyncio
import ctypes
import functools
import hashlib
import hmac
import json
import math
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fairlead_runtime.front.connection import CHUNKS, HEADER_BYTES
from fairlead_runtime.front.key_file import KeyRing
from support import tiny
from support.api_harness import http
from support.serve_process import Process, hanging_device, serve, slow_device, stream_events

pytestmark = pytest.mark.full

MB = 1_000_000
STREAM = {  # a long one
    "model": "tiny",
    "prompt": [1, 2, 3],
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
}
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.build("llama"), tmp_path_factory.mktemp("llama")))


@contextmanager
def serving(model: str, *flags: str, **prepared: Any) -> Iterator[Process]:
    with serve(model, "--served-name=tiny", *flags, **prepared) as server:
        server.until_logged("serving")
        yield server


def resident(pid: int) -> int:
    """Bytes that the process holds of its own."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def processor(*pids: int) -> tuple[float, float]:
    """Seconds that the threads of the processes ran so far, and that they waited for a core."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    ran, waited, _ = zip(*(map(int, file.read_text().split()) for file in files), strict=True)
    return sum(ran) / 1e9, sum(waited) / 1e9


def clock(*pids: int) -> float:
    """Seconds, without those in which this process or one of the others waited for a core: on an
    idle machine a monotonic clock.
    """
    return time.monotonic() - processor(os.getpid(), *pids)[1]


async def connect(server: Process) -> Connection:
    return await asyncio.open_connection(
        "127.0.0.1", int(server.ports["public"].rpartition(":")[2])
    )


async def answered(connection: Connection, request: bytes) -> tuple[int, bytes]:
    """The status and the body of the answer; the connection is kept."""
    reader, writer = connection
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    status, length = int(head.split(maxsplit=2)[1]), re.search(rb"content-length: (\d+)", head)
    if length is None:
        return status, await reader.readuntil(b"\r\n0\r\n\r\n")  # in chunks
    return status, await reader.readexactly(int(length[1]))


def series(admin: httpx.Client, *prefixes: str) -> dict[str, float]:
    """The values of the series whose names begin so."""
    lines = admin.get("/metrics").text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith(prefixes))
    return {labels: float(value) for labels, value in found}


async def slowest(server: Process) -> float:
    """Seconds that all but one of 100 small requests, one after the other, take; of eight times."""
    connection = await connect(server)

    async def one() -> float:
        began = clock(server.pid)
        await answered(connection, http("GET", "/v1/models"))
        return clock(server.pid) - began

    rounds = [sorted([await one() for _ in range(100)])[98] for _ in range(8)]
    connection[1].close()
    return min(rounds)


async def polled(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds."""
    while not condition():  # noqa: ASYNC110 - it asks another process
        await asyncio.sleep(0.01)


async def until_closed(server: Process, connection: Connection) -> float:
    """Seconds until the server ends the connection, with or without an answer."""
    began = clock(server.pid)
    reader, writer = connection
    await reader.read()
    writer.close()
    return clock(server.pid) - began


def test_half_sent_requests_are_closed_in_time_take_little_and_delay_nobody(model: str) -> None:
    async def scenario(server: Process) -> None:
        alone, before = await slowest(server), resident(server.pid)
        whole = http("POST", "/v1/completions", b"x" * 1000)
        headers: list[asyncio.Task[float]] = []
        bodies: list[asyncio.Task[float]] = []
        for number in range(1200):
            reader, writer = await connect(server)
            writer.write(whole[:40] if number < 1000 else whole[:-5])
            ending = asyncio.create_task(until_closed(server, (reader, writer)))
            (headers if number < 1000 else bodies).append(ending)
        beside = await slowest(server)
        assert resident(server.pid) - before <= 50 * MB
        were_there = not any(ending.done() for ending in headers[-100:] + bodies)
        assert were_there, "the machine is too busy to measure others within the 10 s of a header"
        assert max(await asyncio.gather(*headers)) <= 12
        assert max(await asyncio.gather(*bodies)) <= 35
        assert beside <= 1.2 * max(alone, await slowest(server))

    with serving(model) as server:
        asyncio.run(scenario(server))


LINE = b"a: x\r\n"
CHUNK = b"1\r\n \r\n"
CHUNKED = http(
    "POST", "/v1/completions", Content_Type="application/json", Transfer_Encoding="chunked"
)


@pytest.mark.parametrize(
    ("allowed", "more"),
    [
        (b"GET /healthz HTTP/1.1\r\na: " + b"x" * (HEADER_BYTES - 100), b"x" * 20_000_000),
        (b"GET /healthz HTTP/1.1\r\n" + LINE * 90, LINE * 50_000),
        (CHUNKED + CHUNK * (CHUNKS - 1), CHUNK * 1_000_000),
    ],
    ids=["a header of 20 MB", "50,000 headers", "1,000,000 chunks"],
)
def test_a_bomb_is_refused_at_once_and_leaves_nothing(
    model: str, allowed: bytes, more: bytes
) -> None:
    async def refused(server: Process, admin: httpx.Client) -> float:
        """Seconds from the first byte beyond the limit, all before being read, to the answer."""
        reader, writer = await connect(server)
        writer.write(allowed)
        if allowed.endswith(CHUNK):
            name = "fairlead_http_body_bytes"
            await polled(lambda: [*series(admin, name).values()] == [CHUNKS - 1])
        began = clock(server.pid)
        writer.write(more)
        status = (await reader.readline()).split()[1]
        taken = clock(server.pid) - began
        assert status in {b"400", b"413", b"431"}
        writer.transport.abort()
        return taken

    with serving(model) as server, server.client("admin") as admin:
        asyncio.run(refused(server, admin))
        before = resident(server.pid)
        times = [asyncio.run(refused(server, admin)) for _ in range(5)]
        assert min(times) <= 0.1
        assert resident(server.pid) - before <= 2 * MB


SIZE = 2 * MB - 1000
HOSTILE = {
    "a wrong field after a long text": b'{"prompt": "%s", "n": 99}' % (b"x" * SIZE),
    "brackets": b"[" * SIZE,
    "numbers for an unknown field": b'{"a": [%s1]}' % (b"1," * (SIZE // 2)),
    "infinity after a million numbers": b'{"prompt": [%s1e999]}' % (b"1," * (SIZE // 2)),
    "keys": json.dumps({f"k{number}": number for number in range(SIZE // 20)}).encode(),
    "messages of no role": json.dumps(
        {"messages": [{"role": "x", "content": "y"}] * 1000, "pad": "x" * (SIZE - 50_000)}
    ).encode(),
    "halves of surrogate pairs": b'{"prompt": "%s"}' % (b"\\ud800" * (SIZE // 6)),
    "escapes": b'{"prompt": "%s", "n": 99}' % (b"\\n" * (SIZE // 2)),
}


def test_a_refused_body_takes_at_most_10_ms_of_the_processor_a_megabyte(model: str) -> None:
    with serving(model) as server, server.client() as client:

        def taken(path: str, body: bytes) -> float:
            """Milliseconds a megabyte."""
            before, _ = processor(server.pid)
            headers = {"content-type": "application/json"}
            answer = client.post(path, content=body, headers=headers)
            assert answer.status_code == 400, answer.text
            assert len(answer.content) <= 4096
            return 1000 * (processor(server.pid)[0] - before) / (len(body) / MB)

        for name, body in HOSTILE.items():
            for path in ("/v1/completions", "/v1/chat/completions"):
                # The least of several: other processes share the core's caches.
                least = min(taken(path, body) for _ in range(8))
                print(f"{path}, {name}: {least:.1f} ms of the processor a megabyte")
                assert least <= 10, name


def test_two_thousand_resets_within_a_second_free_every_block_within_another(model: str) -> None:
    request = http("POST", "/v1/completions", json.dumps(STREAM).encode())
    live = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")

    async def scenario(server: Process, admin: httpx.Client) -> None:
        writers = []
        for _ in range(2000):
            _, writer = await connect(server)
            writer.write(request)
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writers.append(writer)

        def count() -> float:
            return sum(series(admin, *live).values())

        await polled(lambda: count() == 2000)
        began = time.monotonic()
        for number, writer in enumerate(writers):
            writer.close()
            if number % 20 == 19:
                await asyncio.sleep(max(0.0, began + number / 2000 - time.monotonic()))
        ended = clock(server.pid, server.engine_pid)
        await polled(lambda: not count())
        assert clock(server.pid, server.engine_pid) - ended <= 1

    flags = ("--max-queue=2048", "--num-blocks=8192", "--queue-timeout=600")
    with serving(model, *flags, prepare=slow_device) as server, server.client("admin") as admin:
        asyncio.run(scenario(server, admin))
        assert admin.get("/debug/cache").json()["held"] == 0


def vanish(writer: asyncio.StreamWriter) -> None:
    """Let the peer's kernel drop all that arrives: nothing is acknowledged or reset any more, as
    when a machine loses its power. The filter is one instruction, which accepts 0 bytes.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    filters = struct.pack("HP", 1, ctypes.addressof(program))
    attach = 26  # SO_ATTACH_FILTER, which the module does not name
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, attach, filters)


def test_the_blocks_of_peers_that_vanish_are_free_within_90_seconds(model: str) -> None:
    """Of those that are sent to, and of those that wait for a whole answer."""
    live = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")

    async def scenario(server: Process, admin: httpx.Client) -> None:
        connections = []
        for number in range(40):
            reader, writer = await connect(server)
            body = json.dumps({**STREAM, "stream": number % 2 == 0}).encode()
            writer.write(http("POST", "/v1/completions", body))
            connections.append((reader, writer))
        for reader, _ in connections[::2]:
            await reader.readuntil(b"data: ")
        await polled(lambda: sum(series(admin, *live).values()) == 40)
        began = clock(server.pid, server.engine_pid)
        for _, writer in connections[2:]:
            vanish(writer)
        await polled(lambda: sum(series(admin, *live).values()) == 2)
        taken = clock(server.pid, server.engine_pid) - began
        print(f"38 peers that vanished were found within {taken:.0f} s")
        assert taken <= 90
        assert len(await connections[0][0].readuntil(b"data: ")) > 0
        for _, writer in connections:
            writer.transport.abort()
        await polled(lambda: not sum(series(admin, *live).values()))

    slow = functools.partial(slow_device, 0.2)
    with (
        serving(model, "--num-blocks=8192", prepare=slow) as server,
        server.client("admin") as admin,
    ):
        asyncio.run(scenario(server, admin))
        assert admin.get("/debug/cache").json()["held"] == 0


def test_a_hung_step_shows_in_the_probes_after_5_and_60_seconds(model: str) -> None:
    def until_refused(admin: httpx.Client, path: str) -> float:
        while admin.get(path).status_code == 200:
            time.sleep(0.02)
        return time.monotonic()

    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 90, "stream": True}
    with (
        serving(model, prepare=hanging_device) as server,
        server.client("admin") as admin,
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        events = stream_events(response)
        next(events)
        began = time.monotonic()
        # A state comes each second.
        assert 4 <= until_refused(admin, "/readyz") - began <= 6.5
        assert 58 <= until_refused(admin, "/healthz") - began <= 62


def test_readiness_ends_within_100_ms_of_sigterm_beside_100_streams(model: str) -> None:
    flags = ("--drain-grace=2", "--drain-timeout=60", "--num-blocks=8192")
    reached = threading.Semaphore(0)
    ends: list[Any] = []

    def read(server: Process) -> None:
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=STREAM) as response,
        ):
            events = stream_events(response)
            next(events)
            reached.release()
            *_, last = events
            ends.append(last)

    with serving(model, *flags, prepare=slow_device) as server, server.client("admin") as admin:
        readers = [threading.Thread(target=read, args=(server,)) for _ in range(100)]
        for reader in readers:
            reader.start()
        for _ in readers:
            reached.acquire()
        assert admin.get("/readyz").status_code == 200
        began = time.monotonic()
        server.terminate()
        while admin.get("/readyz").status_code == 200:
            pass
        assert time.monotonic() - began <= 0.1
        for reader in readers:
            reader.join()
        finished = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - max(finished, began + 2) <= 5, "seconds for the last bytes"
        assert ends == ["[DONE]"] * 100


def t_of(find: Callable[[bytes], Any], first: bytes, second: bytes, calls: int) -> float:
    """Welch's t of the times of ``find`` for two credentials, in random order; of each the slowest
    tenth is left out, as interruptions (Reparaz, Balasch and Verbauwhede: "dude, is my code
    constant time?", 2017). Of each there are copies, since where bytes lie takes time, too.
    """
    rng, clock = random.Random(1), time.perf_counter_ns
    copies = [[bytes(bytearray(credential)) for _ in range(256)] for credential in (first, second)]
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(calls):
        which = rng.getrandbits(1)
        credential = copies[which][rng.getrandbits(8)]
        began = clock()
        find(credential)
        times[which].append(clock() - began)
    means, errors = [], []
    for each in times:
        kept = sorted(each)[: len(each) * 9 // 10]
        mean = sum(kept) / len(kept)
        means.append(mean)
        errors.append(sum((value - mean) ** 2 for value in kept) / len(kept) ** 2)
    return (means[0] - means[1]) / math.sqrt(sum(errors))


def test_the_time_of_a_comparison_does_not_tell_how_close_a_key_is(tmp_path: Path) -> None:
    keys = [f"{number:02}" + "k" * 62 for number in range(16)]
    path = tmp_path / "keys"
    path.write_text("\n".join(keys))
    ring = KeyRing(str(path))
    far, close = b"x" * 64, keys[0][:-1].encode() + b"x"
    assert ring.find(far) is ring.find(close) is None
    assert abs(t_of(ring.find, far, close, 1_000_000)) < 4.5
    # The same statistic sees a search that ends at the first key that fits.
    digests = [key.digest for key in ring._keys]

    def ends_early(credential: bytes) -> bool:
        ring.refresh()
        digest = hashlib.sha256(credential).digest()
        return any(hmac.compare_digest(digest, each) for each in digests)

    assert abs(t_of(ends_early, keys[0].encode(), keys[-1].encode(), 20_000)) > 4.5


def test_a_thousand_secrets_are_nowhere_and_odd_model_names_make_no_series(
    model: str, tmp_path: Path
) -> None:
    key = "a-key-of-a-client-0123456789-0123456789"
    (keys := tmp_path / "keys").write_text(f"{key} name=alice\n")
    rng = random.Random(2)
    secrets = [f"{rng.getrandbits(128):032x}" for _ in range(1000)]
    kept: list[str] = []

    def body(**fields: Any) -> bytes:
        return json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1, **fields}).encode()

    def request(content: bytes, **headers: str) -> bytes:
        return http(
            "POST", "/v1/completions", content, **{"Authorization": f"Bearer {key}"} | headers
        )

    def with_secret(secret: str) -> Iterator[bytes]:
        yield request(body(prompt=secret))
        yield request(body(), X_Request_Id=f"<{secret}>")
        yield request(body(), Authorization=f"Bearer {secret}")
        yield request(body(), X_Secret=secret)
        yield request(body(n=secret))
        yield request(body(user=secret))
        yield request(body(cache_salt=secret))
        yield request(body(structured_outputs={"regex": f"({secret}"}))
        yield request(body(chat_template=secret))
        yield request(body(**{secret: "\ud800"}))

    async def sent(server: Process, requests: Iterator[bytes], status: int | None = None) -> None:
        """Send all on 32 connections, and keep the errors."""

        async def send() -> None:
            connection = await connect(server)
            for each in requests:
                found, answer = await answered(connection, each)
                assert status in {None, found}, answer
                if found != 200:
                    kept.append(answer.decode())
            connection[1].close()

        await asyncio.gather(*(send() for _ in range(32)))

    def count(server: Process) -> int:
        with server.client("admin") as admin:
            kept.append(admin.get("/metrics").text)
            return len(series(admin, "vllm:", "fairlead_"))

    with serving(model, f"--api-key-file={keys}", "--log-level=debug") as server:
        asyncio.run(sent(server, (each for secret in secrets for each in with_secret(secret))))
        before = count(server)
        odd = (request(body(model=f"m{number}")) for number in range(100_000))
        asyncio.run(sent(server, odd, 404))
        assert count(server) == before
        server.terminate()
        assert server.end() == 0
        everything = "\n".join([*kept, *server.lines])
    assert "alice" in everything
    assert not [secret for secret in secrets if secret in everything]
    assert key not in everything
