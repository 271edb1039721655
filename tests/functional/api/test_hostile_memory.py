"""A hostile mix at all limits at once stays inside the memory that the pod planned.

A real server on the demo model. The client keeps the queue full of the longest prompts with the
most choices, log-probabilities and stop texts, fills the budgets of bodies and of whole answers,
and reads streams slowly or never. `make test` plays a small queue, FAIRLEAD_FULL=1 the default one.
"""

import asyncio
import json
import random
import socket
from collections import Counter
from typing import Any

from support.footprint import looks_at, memory_report, planned_bytes
from support.full import LONG_FORM
from support.serve_process import WITHIN, serve

LONGEST, VOCABULARY, OUTPUT = 2048, 1024, 64  # of the demo model; tokens of one answer
QUEUE, SLOTS, BODIES = (1024, 256, 256) if LONG_FORM else (96, 32, 80)
MAX_BODY = 2 * 1024 * 1024
RETRY_SECONDS = 0.1
ANSWERS = 4_000 if LONG_FORM else 300  # every place of the queue is taken three times
# What the refusals say once a limit is met.
LIMITS = (
    "requests wait already",  # the queue
    "prompts are being read",  # the bodies of all
    "answers with log-probabilities",  # whole answers and prompts' log-probabilities of all
    "all answers that are held whole",  # one whole answer
    "tokens, but",  # one prompt
)


class Hostile:
    """Many connections of one client, open until every limit has been met."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("http://").rsplit(":", 1)
        self._host, self._port = host, int(port)
        self._rng = random.Random(1)
        self.answers: Counter[str] = Counter()  # by status and the first words of an error
        self.met = asyncio.Event()
        self._served = asyncio.Event()

    async def run(self) -> None:
        """Whole answers and streams first, since later the queue has no place for them."""
        try:
            async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
                tasks = [self._start(group, self._whole_answer, i) for i in range(12)]
                tasks += [self._start(group, self._slow_reader) for _ in range(8)]
                await self._served.wait()
                queued = QUEUE + SLOTS + 16
                tasks += [self._start(group, self._long_prompt) for _ in range(queued)]
                tasks += [self._start(group, self._body, i) for i in range(BODIES)]
                await self.met.wait()
                for task in tasks:
                    task.cancel()
        except TimeoutError:
            raise AssertionError(f"not every limit was met: {self.answers}") from None

    def _count(self, answer: str) -> None:
        self.answers[answer] += 1
        if self.answers["200 whole"] and self.answers["200 slow"]:
            self._served.set()
        met = all(any(text in seen for seen in self.answers) for text in LIMITS)
        if met and self.answers.total() >= ANSWERS:
            self.met.set()

    def _start(self, group: asyncio.TaskGroup, send: Any, *arguments: Any) -> "asyncio.Task[None]":
        return group.create_task(self._repeat(send, *arguments))

    async def _repeat(self, send: Any, *arguments: Any) -> None:
        while not self.met.is_set():
            try:
                await send(*arguments)
            except ConnectionError:
                self._count("closed")
            await asyncio.sleep(RETRY_SECONDS)

    async def _long_prompt(self) -> None:
        body = self._generation(n=8, logprobs=20, stream=True, stop=["x" * 256] * 4)
        await self._post(body, "long")

    async def _whole_answer(self, number: int) -> None:
        """A small one, one that runs on and on, or one that exceeds the budget of all alone."""
        sizes: dict[str, Any] = {"n": 8, "max_tokens": LONGEST - 64}
        if number % 3 == 0:
            sizes = {"n": 1, "max_tokens": 8}
        prompts = [[self._rng.randrange(3, VOCABULARY) for _ in range(64)]]
        body = self._generation(prompt=prompts * (64 if number % 3 == 1 else 1), logprobs=20)
        await self._post(body | sizes, "whole")

    async def _body(self, number: int) -> None:
        """As large as allowed: token ids that cannot fit, a text that cannot fit, spaces around a
        short prompt, or a body that never ends.
        """
        if number % 4 == 0:
            size = MAX_BODY // 4 - 64
            await self._post({"model": "demo", "prompt": [1] * 2 + [7] * (size // 2)}, "body")
        elif number == 1:  # one client: a text waits for idle time, and large bodies behind it
            await self._post({"model": "demo", "prompt": "\u00e4" * (16 * LONGEST)}, "body")
        elif number % 4 == 1:
            raw = json.dumps(self._generation(prompt=[5, 6, 7])).encode()
            await self._post(raw + b" " * (MAX_BODY - len(raw)), "body")
        else:
            reader, writer = await self._open(b" " * (MAX_BODY - 1), MAX_BODY)
            await self._answer(reader, writer, "unfinished")

    async def _slow_reader(self) -> None:
        body = self._generation(n=8, logprobs=20, stream=True, prompt=[5, 6, 7], max_tokens=400)
        raw = json.dumps(body).encode()
        reader, writer = await self._open(raw, len(raw), limit=1024)
        self._count("200 slow" if await _status(reader) == "200" else "refused slow")
        await self.met.wait()
        writer.transport.abort()

    def _generation(self, **changes: Any) -> dict[str, Any]:
        prompt = [self._rng.randrange(3, VOCABULARY) for _ in range(LONGEST - OUTPUT)]
        common = {"model": "demo", "max_tokens": OUTPUT, "ignore_eos": True}
        return common | {"prompt": prompt} | changes

    async def _post(self, body: dict[str, Any] | bytes, kind: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self._answer(*await self._open(raw, len(raw)), kind)

    async def _open(
        self, body: bytes, length: int, limit: int = 1 << 16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which the request is sent, in one piece with its connecting: on a busy
        machine the client's other tasks may take longer than the server waits for a header.
        """
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: pod\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        )
        request = head.encode() + body
        connection = socket.create_connection((self._host, self._port))
        connection.setblocking(False)
        sent = connection.send(request)
        reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
        writer.write(request[sent:])
        return reader, writer

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str
    ) -> None:
        try:
            status = await _status(reader)
            rest = b""
            while piece := await reader.read(1 << 16):
                rest = (rest + piece)[-2000:]
            found = rest.find(b'"message":"')
            words = rest[found + 11 : found + 400].decode(errors="replace") if found >= 0 else ""
            self._count(f"{status} {kind} {words}" if status != "200" else f"200 {kind}")
        finally:
            writer.transport.abort()


async def _status(reader: asyncio.StreamReader) -> str:
    """Raises ConnectionResetError when the server closes without an answer."""
    line = await reader.readline()
    if not line:
        raise ConnectionResetError
    return line.split(b" ")[1].decode()


def test_a_hostile_mix_at_all_limits_stays_inside_the_planned_memory() -> None:
    flags = (
        "--num-blocks=1024",
        f"--max-queue={QUEUE}",
        f"--max-requests={SLOTS}",
        "--served-name=demo",
    )
    with serve("demo:", *flags) as server:
        server.until_logged("serving")
        planned = planned_bytes(memory_report(server))
        hostile = Hostile(server.ports["public"])
        with looks_at(server.pid) as taken:
            asyncio.run(hostile.run())
        with server.client() as client:
            request = {"model": "demo", "prompt": [1, 2]}
            # The queue is full until the server has seen that those in it are gone.
            while (answer := client.post("/v1/completions", json=request)).status_code == 429:
                pass
            assert answer.status_code == 200, "it serves after that"
        peak = max(taken.seen)
        assert peak <= planned, f"{peak} of {planned}: {hostile.answers}"
        print(f"peak {peak >> 20} MiB of {planned >> 20} planned", dict(hostile.answers))
