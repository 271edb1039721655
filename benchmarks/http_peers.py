"""Whole servers on the same models: ours, `transformers serve` and vLLM's CPU build.

`http_server.py --parts servers` runs it and says more. All servers have the model loaded at once,
and one works at a time. Every request streams TOKENS tokens from a prompt that no earlier one had.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks import models, peers
from benchmarks.turns import OURS

MODELS = ("15 M", "135 M")
STREAMS = (1, 8, 32)
TOKENS = 64
CHARACTERS = 64  # of a prompt: as many tokens
START_SECONDS = 900.0  # for a server to load and answer
ANSWER_SECONDS = 600.0


class Kind(NamedTuple):
    """A server: its command for a model and a port, and what its requests have in addition."""

    versions: Callable[[], str]
    command: Callable[[str, int], list[str]]
    fields: Mapping[str, object]
    environment: Mapping[str, str]


def _ours(model: str, port: int) -> list[str]:
    program = str(Path(sys.executable).with_name("fairlead"))
    ports = [f"--port={port}", f"--admin-port={free_port()}"]
    return [program, "serve", model, *ports, "--dtype=float32", "--log-level=warning"]


def _transformers(model: str, port: int, *more: str) -> list[str]:
    program = str(peers.TRANSFORMERS.programs() / "transformers")
    place = ["--host", "127.0.0.1", "--port", str(port)]
    return [program, "serve", model, *place, "--device", "cpu", "--dtype", "float32", *more]


def _continuous(model: str, port: int) -> list[str]:
    blocks = ["--cb-num-blocks", "256", "--cb-max-batch-tokens", "512"]
    return _transformers(model, port, "--continuous-batching", *blocks)


def _vllm(model: str, port: int) -> list[str]:
    # Its command asks for the version of a package called vllm, which this build is not.
    program = [str(peers.VLLM.programs() / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    limits = ["--dtype", "float32", "--max-model-len", str(models.LONGEST)]
    return [*program, "--model", model, *place, *limits]


KINDS = {
    OURS: Kind(
        lambda: f"fairlead {version('fairlead')}, torch {version('torch')}",
        _ours,
        {"ignore_eos": True},
        {},
    ),
    "transformers serve": Kind(peers.TRANSFORMERS.versions, _transformers, {}, {}),
    "transformers serve, continuous batching": Kind(
        peers.TRANSFORMERS.versions, _continuous, {}, {}
    ),
    "vLLM on CPU": Kind(
        peers.VLLM.versions, _vllm, {"ignore_eos": True}, {"VLLM_CPU_KVCACHE_SPACE": "2"}
    ),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Server:
    """One server that has answered. Raises RuntimeError with the end of its log where it ends, does
    not answer in time or answers otherwise than asked.
    """

    def __init__(self, kind: Kind, model: str, log: Path) -> None:
        self._kind, self._model, self._log = kind, model, log
        self._port = free_port()
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **kind.environment}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                kind.command(model, self._port),
                stdout=out,
                stderr=out,
                env=environ,
                start_new_session=True,
            )
        try:
            asyncio.run(self._until_answered())
        except BaseException:
            self.close()
            raise

    async def _until_answered(self) -> None:
        ends = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < ends:
            try:
                status, lines = await self._post({"prompt": prompt(0), "stream": False})
            except (OSError, TimeoutError):
                await asyncio.sleep(1)
                continue
            if status != 503:
                answer = json.loads(lines[-1])
                if status == 200 and answer["usage"]["completion_tokens"] == TOKENS:
                    return
                raise RuntimeError(f"it answers {status} {lines[-1][:500]!r}")
            await asyncio.sleep(1)
        raise RuntimeError(f"it does not answer:\n{self._log.read_text()[-2000:]}")

    def run(self, prompts: Sequence[str]) -> tuple[float, list[float]]:
        """Streams of all at once: seconds to the last byte, and to each one's first text."""

        async def all_streams() -> tuple[float, list[float]]:
            began = time.perf_counter()
            times: list[list[float]] = [[] for _ in prompts]
            streams = zip(prompts, times, strict=True)
            await asyncio.gather(*(self.stream(text, TOKENS, came) for text, came in streams))
            return time.perf_counter() - began, [came[0] - began for came in times]

        return asyncio.run(all_streams())

    async def stream(self, text: str, tokens: int, times: list[float]) -> None:
        """``times`` gets when each event with text came, as it comes."""
        fields = {"prompt": text, "max_tokens": tokens, "stream": True}
        status, _ = await self._post(fields, times)
        if status != 200 or not times:
            raise RuntimeError(f"a stream failed with {status}")

    async def _post(
        self, fields: dict[str, object], times: list[float] | None = None
    ) -> tuple[int, list[bytes]]:
        """Status and lines of the body; ``times`` gets when each event with text came."""
        body = {"model": self._model, "max_tokens": TOKENS, "temperature": 0, **fields}
        content = json.dumps({**body, **self._kind.fields}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(head.encode() + content)
                status = int((await reader.readline()).split()[1])
                lines = []
                while line := await reader.readline():
                    lines.append(line)
                    if times is not None and b'"text":"' in line.replace(b'": "', b'":"'):
                        times.append(time.perf_counter())
                # A body in chunks ends with an empty one.
                return status, [line for line in lines if line.strip() not in {b"", b"0"}]
            finally:
                writer.close()

    def close(self) -> None:
        peers.end(self._process)


def prompt(number: int) -> str:
    return characters(random.Random(number), CHARACTERS)


def characters(draw: random.Random, count: int) -> str:
    """As many tokens of the models of ``models.py``."""
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=count))


@contextmanager
def started(model: str, folder: Path, kinds: Mapping[str, Kind]) -> Iterator[dict[str, Server]]:
    """All servers that start; says why another does not."""
    with ExitStack() as stack:
        found: dict[str, Server] = {}
        for number, (name, kind) in enumerate(kinds.items()):
            try:
                versions = kind.versions()
                server = Server(kind, model, folder / f"server-{number}.log")
            except (AssertionError, RuntimeError) as error:
                print(f"{name}: left out, {error}", flush=True)
                continue
            stack.callback(server.close)
            print(f"{name}: {versions}", flush=True)
            found[name] = server
        yield found


def compare(rounds: int, names: Sequence[str]) -> None:
    """Print the table of each model."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no server stays behind
    numbers = itertools.count(1)  # no prompt is sent twice, so no cache has its prefix
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "model"
            models.save(name, place)
            print(f"\n{name}, {TOKENS} tokens after {CHARACTERS}", flush=True)
            with started(str(place), Path(folder), KINDS) as servers:
                print("\n| streams | server | tokens/s | of ours | s to the first text, median |")
                print("|---|---|---|---|---|")
                for streams in STREAMS:
                    _rows(servers, streams, rounds, lambda: prompt(next(numbers)))


def _rows(
    servers: Mapping[str, Server], streams: int, rounds: int, new_prompt: Callable[[], str]
) -> None:
    speeds: dict[str, list[float]] = {name: [] for name in servers}
    firsts: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + 1):
        for name in list(servers)[:: 1 if number % 2 else -1]:
            seconds, first = servers[name].run([new_prompt() for _ in range(streams)])
            if number:  # the first round warms up
                speeds[name].append(streams * TOKENS / seconds)
                firsts[name] += first
    for name in servers:
        own = speeds.get(OURS, speeds[name])
        ratios = [speed / ours for speed, ours in zip(speeds[name], own, strict=True)]
        cells = (
            spread(speeds[name], 0),
            spread(ratios, 2),
            f"{statistics.median(firsts[name]):.2f}",
        )
        print(f"| {streams} | {name} | {' | '.join(cells)} |", flush=True)


def spread(values: Sequence[float], digits: int) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"
