"""The client pod's program: sends requests to one URL as told by POST /start, until POST /stop.

It has three kinds of senders at once: requests on new connections at a fixed rate, workers that
each keep one connection, and workers that read long streams. Every answer that is not whole is
recorded with its time and its cause. It runs on the operator image's Python and aiohttp alone.
"""

import asyncio
import itertools
import json
import time
from typing import Any

import aiohttp
from aiohttp import web

PATIENCE = aiohttp.ClientTimeout(total=300, sock_connect=20)


class Sending:
    """The times of one request: ``began``, and ``sent`` once its head has gone out on a connection.
    Given as a request's trace context.
    """

    def __init__(self) -> None:
        self.began = time.time()
        self.sent: float | None = None


async def _note_sent(_session: object, trace: Any, _head: object) -> None:
    trace.trace_request_ctx.sent = time.time()


def client_session(**connector: Any) -> aiohttp.ClientSession:
    """A session without a cache of names, whose requests note when they were sent."""
    traces = aiohttp.TraceConfig()
    traces.on_request_headers_sent.append(_note_sent)
    return aiohttp.ClientSession(
        timeout=PATIENCE,
        connector=aiohttp.TCPConnector(use_dns_cache=False, **connector),
        trace_configs=[traces],
    )


class Load:
    """One load: see ``main`` for the fields of ``wanted``."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.wanted = wanted
        self.began = time.time()
        self.stopping = False
        self.open = 0
        self.answered: list[tuple[float, float]] = []  # begin, seconds
        self.streams = 0
        self.busy = 0
        self.failed: list[dict[str, Any]] = []
        self.cut: list[dict[str, Any]] = []
        self.senders = [asyncio.create_task(self.paced())]
        self.senders += [asyncio.create_task(self.kept()) for _ in range(wanted["kept"])]
        self.senders += [asyncio.create_task(self.streaming()) for _ in range(wanted["streams"])]

    async def stop(self) -> None:
        """Ends when every running request has its answer."""
        self.stopping = True
        await asyncio.gather(*self.senders)

    def report(self) -> dict[str, Any]:
        took = sorted(seconds for _, seconds in self.answered)
        ends = sorted(begin + seconds for begin, seconds in self.answered)
        gaps = [after - before for before, after in itertools.pairwise(ends)]
        return {
            "seconds": time.time() - self.began,
            "answered": len(self.answered),
            "streams": self.streams,
            "busy": self.busy,
            "failed": self.failed,
            "cut": self.cut,
            "open": self.open,
            "median": took[len(took) // 2] if took else None,
            "p99": took[len(took) * 99 // 100] if took else None,
            "longest_gap": max(gaps, default=None),
        }

    async def paced(self) -> None:
        """A request every 1/rate seconds, each on a connection of its own."""
        if not self.wanted["new_per_second"]:
            return
        pause = 1 / self.wanted["new_per_second"]
        due, running = time.monotonic(), set()
        while not self.stopping:
            task = asyncio.create_task(self.once())
            running.add(task)
            task.add_done_callback(running.discard)
            due = max(due + pause, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.gather(*running)

    async def once(self) -> None:
        async with client_session(force_close=True) as session:
            await self.complete(session, "new")

    async def kept(self) -> None:
        async with client_session(limit=1) as session:
            while not self.stopping:
                await self.complete(session, "kept")
                await asyncio.sleep(self.wanted["pause"])

    async def complete(self, session: aiohttp.ClientSession, kind: str) -> None:
        tokens, times = self.wanted["tokens"], Sending()
        body = self.body(tokens)
        self.open += 1
        try:
            async with session.post(
                self.wanted["url"], json=body, trace_request_ctx=times
            ) as answer:
                content = await answer.read()
                if answer.status == 429:
                    self.busy += 1
                    return
                if answer.status != 200:
                    self.fail(kind, times, f"status {answer.status}: {content[:300]!r}")
                    return
                received = json.loads(content)["usage"]["completion_tokens"]
                if received != tokens:
                    self.cut_off(kind, times, f"{received} tokens")
                    return
                self.answered.append((times.began, time.time() - times.began))
        except Exception as error:  # noqa: BLE001 - every failure is a figure of the report
            self.fail(kind, times, f"{type(error).__name__}: {error}")
        finally:
            self.open -= 1

    async def streaming(self) -> None:
        while not self.stopping:
            async with client_session(force_close=True) as session:
                await self.stream(session)
            await asyncio.sleep(self.wanted["pause"])

    async def stream(self, session: aiohttp.ClientSession) -> None:
        tokens, times, received, ended = self.wanted["stream_tokens"], Sending(), 0, False
        body = self.body(tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        self.open += 1
        try:
            async with session.post(
                self.wanted["url"], json=body, trace_request_ctx=times
            ) as answer:
                if answer.status == 429:
                    self.busy += 1
                    return
                if answer.status != 200:
                    self.fail("stream", times, f"status {answer.status}: {await answer.text()}")
                    return
                async for line in answer.content:
                    text = line.decode().strip().removeprefix("data: ")
                    if text == "[DONE]":
                        ended = True
                    elif text:
                        usage = json.loads(text).get("usage") or {}
                        received = usage.get("completion_tokens", received)
            if ended and received == tokens:
                self.streams += 1
            else:
                self.cut_off("stream", times, f"{received} tokens")
        except Exception as error:  # noqa: BLE001 - every failure is a figure of the report
            if isinstance(error, aiohttp.ClientConnectorError):
                self.fail("stream", times, f"{type(error).__name__}: {error}")
            else:
                self.cut_off("stream", times, f"{type(error).__name__}: {error}")
        finally:
            self.open -= 1

    def body(self, tokens: int) -> dict[str, Any]:
        return {
            "model": self.wanted["model"],
            "prompt": "Once upon a time",
            "max_tokens": tokens,
            "ignore_eos": True,
        }

    def cut_off(self, kind: str, times: Sending, what: str) -> None:
        self.cut.append(_loss(kind, times, what))

    def fail(self, kind: str, times: Sending, what: str) -> None:
        self.failed.append(_loss(kind, times, what))


def _loss(kind: str, times: Sending, what: str) -> dict[str, Any]:
    """``sent`` is None where the request never left."""
    return {"kind": kind, **vars(times), "at": time.time(), "what": what}


async def main() -> None:
    loads: dict[str, Load] = {}

    async def start(request: web.Request) -> web.Response:
        """Fields: name, url, model, tokens, stream_tokens, new_per_second, kept, streams, pause."""
        wanted = await request.json()
        loads[wanted["name"]] = Load(wanted)
        return web.json_response({})

    async def look(request: web.Request) -> web.Response:
        return web.json_response(loads[request.match_info["name"]].report())

    async def stop(request: web.Request) -> web.Response:
        load = loads.pop(request.match_info["name"])
        await load.stop()
        return web.json_response(load.report())

    async def ready(_request: web.Request) -> web.Response:
        return web.json_response({"loads": len(loads)})

    app = web.Application()
    app.add_routes(
        [
            web.get("/", ready),
            web.post("/start", start),
            web.get("/{name}", look),
            web.post("/{name}/stop", stop),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, port=8090).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
