"""What HTTP costs: served throughput against the engine alone, and steps beside tokenizing.

Three ways to run the same greedy requests: `LLM` in a process of its own, `fairlead serve` with a
streaming client beside it, and, with --against DIR, the server of another checkout. All are loaded
first; the rounds are interleaved, and only one of them works at a time. Compare the ratios.

Then the time between two tokens of eight streams, while nothing else runs and while another client
has 100 prompts of 100,000 characters tokenized (each is refused afterwards: it is longer than the
model's context).

    .venv/bin/python benchmarks/http_server.py [--models small,demo] [--rounds 5] [--against DIR]

small: a Llama of 135 M parameters (30 layers of 576), random weights, float32. Client, HTTP process
and engine share the machine.
"""

import argparse
import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

STREAMS = (1, 8, 32)
TOKENS = 64
PROMPT = 16
CHARACTERS = 100_000
WORDS = "the quick brown fox jumps over a lazy dog and runs away from it "
SMALL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
FLAGS = ("--block-size=16", "--num-blocks=2048", "--max-batch-tokens=512")


def small(directory: Path) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fairlead_runtime.models.tiny import save

    torch.manual_seed(0)
    factory: Any = LlamaForCausalLM  # transformers' classes are untyped
    return str(save(factory(LlamaConfig(**SMALL)), directory))


def prompts(count: int) -> list[list[int]]:
    return [[10 + (7 * i + j) % 200 for j in range(PROMPT)] for i in range(count)]


# -- the engine alone


def alone(model: str) -> None:
    """Answer each line, a number of requests, with the seconds that they took."""
    from fairlead_runtime import LLM, SamplingParams

    llm = LLM(model, block_size=16, num_blocks=2048, max_batch_tokens=512)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    print("ready", flush=True)
    for line in sys.stdin:
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts(int(line))]
        began = time.perf_counter()
        llm.generate(asked, params, use_tqdm=False)
        print(time.perf_counter() - began, flush=True)


class Alone:
    def __init__(self, model: str) -> None:
        command = [sys.executable, __file__, "--alone", model]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        self._line()

    def run(self, streams: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{streams}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def environment(checkout: Path | None = None) -> dict[str, str]:
    """As the `fairlead` command sets it, see cli.py; modules from another checkout, if given."""
    environ = {"GOMP_SPINCOUNT": "20000", **os.environ}
    if checkout is not None:
        environ["PYTHONPATH"] = f"{checkout}/runtime:{checkout}/kernels:{checkout}/operator"
    return environ


# -- served


class Served:
    def __init__(self, model: str, checkout: Path | None = None) -> None:
        self.model, self.port, admin = model, free_port(), free_port()
        flags = [f"--port={self.port}", f"--admin-port={admin}", *FLAGS, "--log-level=warning"]
        code = "import sys; from fairlead_runtime.cli import main; sys.exit(main(sys.argv[1:]))"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "serve", model, *flags], env=environment(checkout)
        )
        self.run(1, wait=True)

    def run(self, streams: int, *, wait: bool = False) -> float:
        """The seconds that this many streams took; ``wait`` until the server answers."""

        async def all_streams() -> float:
            while True:
                began = time.perf_counter()
                counts = await asyncio.gather(*(self._count(ids) for ids in prompts(streams)))
                if all(counts):
                    return time.perf_counter() - began
                assert wait, "a stream failed"
                assert self._process.poll() is None, "the server ended"
                await asyncio.sleep(0.5)

        return asyncio.run(all_streams())

    def gaps(self, streams: int, rounds: int, *, busy: bool) -> list[float]:
        """Seconds between two tokens of each stream, with or without the other client."""

        async def measure() -> list[float]:
            found: list[float] = []
            for number in range(rounds):
                other = asyncio.create_task(self._flood(number)) if busy else None
                if busy:
                    await asyncio.sleep(0.2)
                for times in await asyncio.gather(*(self._times(ids) for ids in prompts(streams))):
                    found += [b - a for a, b in itertools.pairwise(times)]
                if other is not None:
                    other.cancel()
            return found

        return asyncio.run(measure())

    async def _flood(self, number: int) -> None:
        """100 long prompts, again and again, eight at a time."""
        text = (WORDS * (CHARACTERS // len(WORDS) + 1))[:CHARACTERS]
        body = {"model": self.model, "max_tokens": 8000}
        limit = asyncio.Semaphore(8)

        async def one(i: int) -> None:
            async with limit:
                prompt = f"{number} {i} {text}"[:CHARACTERS]
                async for _ in self._request(body | {"prompt": prompt}):
                    pass

        while True:
            await asyncio.gather(*map(one, range(100)))

    async def _count(self, ids: list[int]) -> int:
        return len(await self._times(ids))

    async def _times(self, ids: list[int]) -> list[float]:
        body = {"model": self.model, "prompt": ids, "max_tokens": TOKENS, "stream": True}
        extra = {"temperature": 0, "ignore_eos": True}
        times: list[float] = []
        async for line in self._request(body | extra):
            if line.startswith(b'data: {"id"'):
                times.append(time.perf_counter())
        return times

    async def _request(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except ConnectionError:
            return
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        while line := await reader.readline():
            yield line
        writer.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# -- the rounds


@contextmanager
def competitors(model: str, against: Path | None) -> Iterator[dict[str, Alone | Served]]:
    with ExitStack() as stack:
        found: dict[str, Alone | Served] = {"engine alone": Alone(model), "served": Served(model)}
        if against is not None:
            found["served before"] = Served(model, against)
        for each in found.values():
            stack.callback(each.close)
        yield found


def throughput(found: dict[str, Alone | Served], rounds: int) -> None:
    for streams in STREAMS:
        ratios: dict[str, list[float]] = {name: [] for name in found}
        speeds: dict[str, list[float]] = {name: [] for name in found}
        for each in found.values():
            each.run(streams)  # warm
        for number in range(rounds):
            order = list(found)[:: 1 if number % 2 else -1]
            taken = {name: found[name].run(streams) for name in order}
            for name, seconds in taken.items():
                speeds[name].append(streams * TOKENS / seconds)
                ratios[name].append(taken["engine alone"] / seconds)
        for name in found:
            print(f"| {streams} | {name} | {spread(speeds[name], 0)} | {spread(ratios[name], 2)} |")


def steps(found: dict[str, Alone | Served], rounds: int) -> None:
    for name, each in found.items():
        if not isinstance(each, Served):
            continue
        quiet: list[float] = []
        busy: list[float] = []
        for _ in range(rounds):
            quiet += each.gaps(8, 1, busy=False)
            busy += each.gaps(8, 1, busy=True)
        for word, gaps in (("nothing else", quiet), ("100 prompts", busy)):
            cut = statistics.quantiles(gaps, n=100)
            print(f"| {name} | {word} | {1000 * cut[49]:.2f} | {1000 * cut[98]:.2f} |")


def spread(values: Sequence[float], digits: int) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="small,demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="a checkout whose server is measured too")
    parser.add_argument("--alone", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(options.alone)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            model = small(Path(folder)) if name == "small" else "demo:"
            with competitors(model, options.against) as found:
                print(
                    f"\n{name}\n| streams | | tokens/s | of the engine alone |\n|---|---|---|---|"
                )
                throughput(found, options.rounds)
                print("\n| | beside | median gap, ms | p99, ms |\n|---|---|---|---|")
                steps(found, options.rounds)


if __name__ == "__main__":
    main()
