"""OpenVINO GenAI behind HTTP: its package has the engine, and no server for it.

    PYTHON openvino_server.py MODEL PORT

Runs in that peer's environment (`peers.OPENVINO`), float32, and answers POST /v1/completions as
much as `http_peers.py` asks: a text, ``max_tokens``, streamed or not, greedy. One thread steps the
engine and serves between the steps, so that neither takes Python's lock from the other. A
server that takes all of OpenAI's fields has more to do.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino_genai
import tokenizers
from openvino import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import cpu_engine

SLOTS = 256
TURNS = 8  # of the event loop between two steps: to accept, to read a request, to hand it over
STREAM = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Engine:
    """The pipeline and its running requests. All methods are called on the event loop."""

    def __init__(self, model: str) -> None:
        self._pipeline = cpu_engine.openvino_pipeline(model, SLOTS)
        self._numbers = itertools.count()
        # Tokens for each reader; the empty list ends them.
        self._running: dict[Any, asyncio.Queue[list[int]]] = {}
        self._arrived = asyncio.Event()

    async def tokens(self, prompt: list[int], cap: int) -> AsyncIterator[list[int]]:
        """The new tokens of each step."""
        ids = Tensor(np.array([prompt], dtype=np.int64))
        settings = cpu_engine.openvino_greedy(cap)
        handle = self._pipeline.add_request(next(self._numbers), ids, settings)
        queue = self._running[handle] = asyncio.Queue()
        self._arrived.set()
        while found := await queue.get():
            yield found

    async def run(self) -> None:
        while True:
            await self._arrived.wait()
            self._pipeline.step()
            for handle, queue in list(self._running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        queue.put_nowait(output.generated_ids)
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    del self._running[handle]
                    queue.put_nowait([])
            if not self._running:
                self._arrived.clear()
            for _ in range(TURNS):
                await asyncio.sleep(0)


class Server:
    def __init__(self, model: str) -> None:
        self._engine = Engine(model)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(Path(model) / "tokenizer.json"))

    async def serve(self, port: int) -> None:
        listener = await asyncio.start_server(self._answer, "127.0.0.1", port)
        async with listener:
            await self._engine.run()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = 0
        while line := (await reader.readline()).strip().lower():
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        body = json.loads(await reader.readexactly(length))
        prompt = self._tokenizer.encode(body["prompt"]).ids
        pieces = self._engine.tokens(prompt, body["max_tokens"])
        if body["stream"]:
            writer.write(STREAM.encode())
            async for piece in pieces:
                writer.write(f"data: {json.dumps(self._content(piece))}\n\n".encode())
            writer.write(b"data: [DONE]\n\n")
        else:
            ids = [one async for piece in pieces for one in piece]
            text = json.dumps({**self._content(ids), "usage": {"completion_tokens": len(ids)}})
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
            writer.write((head + text).encode())
        await writer.drain()
        writer.close()

    def _content(self, ids: list[int]) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": self._tokenizer.decode(ids)}]}


async def main() -> None:
    model, port = sys.argv[1:]
    await Server(model).serve(int(port))


if __name__ == "__main__":
    asyncio.run(main())
