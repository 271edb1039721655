"""The client of the operator's probes: a storm of timeouts costs nothing later, requests wait for
their turn before their deadline starts, and the environment's proxy is for the hub alone.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fairlead_operator.probe.hub import Hub, HubError
from fairlead_operator.probe.pod_client import Pods, ScrapeError
from fairlead_operator.resource.spec import Source

TOKEN = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n" + b'{"token": 5}'


class PodServer:
    """A pod's admin port on loopback. It answers after ``seconds``, and counts requests."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.port = 0
        self.open = self.most_open = 0
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            seconds = self.seconds
            self.asked.set()
            await asyncio.sleep(seconds)
            self.open -= 1  # before the answer: the client may send the next at once
            writer.write(TOKEN)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def pod_server(seconds: float = 0.0) -> AsyncIterator[PodServer]:
    server = PodServer(seconds)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=1000)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


async def canaries(pods: Pods, count: int) -> list[BaseException | None]:
    return await asyncio.gather(
        *(pods.canary("127.0.0.1") for _ in range(count)), return_exceptions=True
    )


@pytest.mark.timeout(60)  # takes 6 s; httpx's pool took minutes, quadratic in what waits
def test_after_a_storm_of_timeouts_every_pod_that_answers_is_heard() -> None:
    async def go() -> None:
        async with (
            pod_server(seconds=60) as server,
            Pods(canary_seconds=0.2, port=server.port) as pods,
        ):
            for _ in range(3):
                for error in await canaries(pods, 600):
                    assert isinstance(error, ScrapeError)
                    assert "TimeoutError" in str(error)
            server.seconds, pods._canaries._seconds = 0.0, 10.0
            assert await canaries(pods, 20) == [None] * 20

    asyncio.run(go())


def test_a_cancelled_request_gives_its_turn_back() -> None:
    async def go() -> None:
        async with pod_server(seconds=60) as server, Pods(port=server.port, at_once=2) as pods:
            for _ in range(20):
                task = asyncio.create_task(pods.canary("127.0.0.1"))
                await asyncio.sleep(0.01)
                task.cancel()
            server.seconds = 0.0
            assert await canaries(pods, 5) == [None] * 5

    asyncio.run(go())


def test_requests_wait_for_their_turn_before_their_deadline_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = most_started = 0  # deadlines of requests
    timeout, deadline = asyncio.timeout, 77.0

    @contextlib.asynccontextmanager
    async def counted(seconds: float) -> AsyncIterator[None]:
        nonlocal started, most_started
        started += seconds == deadline
        most_started = max(most_started, started)
        try:
            async with timeout(seconds):
                yield
        finally:
            started -= seconds == deadline

    async def go() -> None:
        async with (
            pod_server(seconds=0.01) as server,
            Pods(canary_seconds=deadline, port=server.port, at_once=2) as pods,
        ):
            assert await canaries(pods, 16) == [None] * 16
            assert server.most_open == 2

    monkeypatch.setattr("fairlead_operator.probe.http_client.asyncio.timeout", counted)
    asyncio.run(go())
    assert most_started == 2


def test_the_environments_proxy_is_used_for_the_hub_and_never_for_a_pod(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go() -> None:
        async with pod_server() as proxy, pod_server() as server, Pods(5.0, server.port) as pods:
            monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
            monkeypatch.delenv("no_proxy", raising=False)
            await pods.canary("127.0.0.1")
            assert proxy.requests == []
            hub = Hub("http://127.0.0.1:1")
            try:
                assert await hub.config(Source("hf", "owner/name"), "") == {"token": 5}
                monkeypatch.setenv("no_proxy", "127.0.0.1")
                with pytest.raises(HubError):
                    await hub.config(Source("hf", "owner/other"), "")
            finally:
                await hub.close()
            (request,) = proxy.requests
            path = b"http://127.0.0.1:1/owner/name/resolve/main/config.json"
            assert request.startswith(b"GET " + path)

    asyncio.run(go())


def test_canaries_and_pods_that_do_not_answer_take_no_turn_of_those_that_do() -> None:
    async def go() -> None:
        async with (
            pod_server() as server,
            Pods(60.0, server.port, at_once=1, canary_seconds=60.0) as pods,
        ):
            pods._unresponsive._turns = asyncio.Semaphore(0)  # as if each hung
            pods._unresponsive._patience = 0.05
            server.seconds = 60.0
            canary = asyncio.create_task(pods.canary("127.0.0.1"))
            await server.asked.wait()
            server.seconds = 0.0
            with pytest.raises(ScrapeError, match="TimeoutError"):
                await pods.metrics("127.0.0.1", unresponsive=True)
            assert len(server.requests) == 1, "not asked"
            await pods.metrics("127.0.0.1")
            assert not canary.done()
            canary.cancel()

    asyncio.run(go())


def test_each_request_has_a_connection_of_its_own() -> None:
    """A connection that idles is closed by the pod after some seconds; a request that is sent on it
    meanwhile would fail, although the pod is well.
    """

    async def go() -> None:
        connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            with contextlib.suppress(asyncio.IncompleteReadError):
                while True:
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(TOKEN)
            writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with listener, Pods(port=listener.sockets[0].getsockname()[1]) as pods:
            for count in (1, 2, 3):
                await pods.canary("127.0.0.1")
                assert connections == count

    asyncio.run(go())


def test_pods_that_answer_again_are_all_asked_however_many_they_are() -> None:
    async def go() -> None:
        async with pod_server() as server, Pods(60.0, server.port) as pods:
            pods._unresponsive._patience = 60.0
            asked = (pods.metrics("127.0.0.1", unresponsive=True) for _ in range(300))
            assert all(await asyncio.gather(*asked)), "none is skipped for the others"
            assert len(server.requests) == 300

    asyncio.run(go())


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 100_000], ids=["empty", "list", "deep"])
def test_an_answer_that_is_no_object_is_an_error_of_the_scrape(body: bytes) -> None:
    class Answering(Pods):
        async def _read(self, *_: Any) -> bytes:
            return body

    async def go() -> None:
        async with Answering() as pods:
            for answer in (pods.memory, pods.model_config, pods.progress, pods.canary):
                with pytest.raises(ScrapeError, match="not a JSON object"):
                    await answer("127.0.0.1")

    asyncio.run(go())
