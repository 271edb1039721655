"""Engines of other projects beside ours, on the same models and the same CPUs, float32.

Each engine is a process in an environment of its own, made from the package registry and kept
(`benchmarks/peers.py`). All have the model loaded and take turns, the order changing from round to
round, after a warm-up; no prompt comes twice, so no cache has it. Compare the ratios: the time of
another engine over ours in the same round.

- mixed: 64 requests at once, prompts of 16 to 256 tokens, 16 to 128 new tokens.
- tutorial: six requests with caps of 6, 50, 300, 30, 180 and 45 in three slots, GPT-2.
- burst: 8 or 32 requests at once that share their first 512 tokens.
- alone: one request, whose decode reads all weights for each token.

Beside them stand the machine's own limits, measured in the same run: of alone the share of the
memory bandwidth that the weights take, of mixed the share of a large product's rate.

    .venv/bin/python -m benchmarks.cpu_peers [--full] [--models "15 M" "135 M"] [--svg FILE]
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks import models, peers
from benchmarks.cpu_engine import Request
from benchmarks.http_peers import spread
from tqdm import tqdm

OURS = "Fairlead"
SLOTS = 64
TUTORIAL_CAPS, TUTORIAL_SLOTS = (6, 50, 300, 30, 180, 45), 3
SHARED, OWN, ANSWER = 512, 16, 32  # tokens of a burst's requests
ALONE = 64  # new tokens
LOAD_SECONDS = 900.0


class Kind(NamedTuple):
    """An engine: its name in ``cpu_engine.py``, its interpreter, and its versions."""

    name: str
    python: Callable[[], str]
    versions: Callable[[], str]

    @classmethod
    def of(cls, name: str, peer: peers.Peer) -> "Kind":
        return cls(name, lambda: str(peer.programs() / "python"), peer.versions)


KINDS = {
    OURS: Kind(
        "fairlead",
        lambda: sys.executable,
        lambda: f"fairlead {version('fairlead')}, torch {version('torch')}",
    ),
    "transformers, static batches": Kind.of("transformers-static", peers.TRANSFORMERS),
    "transformers, continuous batching": Kind.of("transformers-continuous", peers.TRANSFORMERS),
    "OpenVINO GenAI": Kind.of("openvino", peers.OPENVINO),
    "vLLM on CPU": Kind.of("vllm", peers.VLLM),
}


class Engine:
    """A loaded engine. Raises RuntimeError with the end of its log where it does not load."""

    def __init__(self, kind: Kind, model: Path, slots: int, log: Path) -> None:
        self._log = log
        program = str(Path(__file__).with_name("cpu_engine.py"))
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [kind.python(), program, kind.name, str(model), str(slots)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._read()

    def run(self, requests: Sequence[Request]) -> float:
        """Seconds until the last request ended."""
        assert self._process.stdin is not None
        print(json.dumps(requests), file=self._process.stdin, flush=True)
        answer = self._read()
        if answer["tokens"] != sum(cap for _, cap in requests):
            raise RuntimeError(f"it generated {answer['tokens']} tokens, not as many as asked for")
        seconds: float = answer["seconds"]
        return seconds

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise RuntimeError(f"it ended:\n{self._log.read_text()[-1500:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        peers.end(self._process)


# -- the workloads


class Workload(NamedTuple):
    """``requests`` draws them anew for each round."""

    name: str
    requests: Callable[[random.Random, int], list[Request]]


def _text(draw: random.Random, vocabulary: int, length: int) -> list[int]:
    return [draw.randrange(3, vocabulary) for _ in range(length)]


def mixed(draw: random.Random, vocabulary: int) -> list[Request]:
    return [
        (_text(draw, vocabulary, draw.randint(16, 256)), draw.randint(16, 128)) for _ in range(64)
    ]


def tutorial(draw: random.Random, vocabulary: int) -> list[Request]:
    """Prompts as long as those of ``tutorial.py``: the texts decide nothing."""
    return [(_text(draw, vocabulary, draw.randint(5, 22)), cap) for cap in TUTORIAL_CAPS]


def burst(size: int) -> Callable[[random.Random, int], list[Request]]:
    def requests(draw: random.Random, vocabulary: int) -> list[Request]:
        shared = _text(draw, vocabulary, SHARED)
        return [(shared + _text(draw, vocabulary, OWN), ANSWER) for _ in range(size)]

    return requests


def alone(draw: random.Random, vocabulary: int) -> list[Request]:
    return [(_text(draw, vocabulary, OWN), ALONE)]


ON_EVERY_MODEL = (
    Workload("mixed", mixed),
    Workload("burst of 8", burst(8)),
    Workload("burst of 32", burst(32)),
    Workload("alone", alone),
)
ON_GPT2 = (Workload("tutorial", tutorial),)


# -- the run


def limits() -> dict[str, float]:
    """What this machine can do: "read", bytes a second read by all threads, and "product",
    operations a second of a large float32 product.
    """
    values = torch.ones(2**28)  # 1 GiB
    square = torch.rand(2048, 2048)
    return {
        "read": values.nbytes / _least(values.sum),
        "product": 2 * 2048**3 / _least(lambda: square @ square),
    }


def _least(work: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


@contextmanager
def loaded(model: Path, slots: int, names: Sequence[str]) -> Iterator[dict[str, Engine]]:
    """All engines that load; says why another does not."""
    with ExitStack() as stack:
        found: dict[str, Engine] = {}
        for number, name in enumerate(names):
            try:
                versions = KINDS[name].versions()
                engine = Engine(KINDS[name], model, slots, model / f"{number}.log")
            except (AssertionError, RuntimeError) as error:
                print(f"{name}: left out, {error}", flush=True)
                continue
            stack.callback(engine.close)
            print(f"{name}: {versions}", flush=True)
            found[name] = engine
        yield found


def measure(
    engines: Mapping[str, Engine], workload: Workload, vocabulary: int, rounds: int, seed: int
) -> tuple[dict[str, list[float]], list[list[Request]]]:
    """Seconds of each engine, and the requests, of each round after the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    drawn = [workload.requests(random.Random(seed + at), vocabulary) for at in range(rounds + 1)]
    turns = [
        (number, name)
        for number in range(rounds + 1)
        for name in list(engines)[:: 1 if number % 2 else -1]
    ]
    for number, name in tqdm(turns, desc=workload.name, leave=False):
        if name not in seconds:
            continue
        try:
            taken = engines[name].run(drawn[number])
        except RuntimeError as error:
            print(f"{name}: left out of {workload.name}, {error}", flush=True)
            del seconds[name]
            continue
        if number:  # the first round warms up
            seconds[name].append(taken)
    return seconds, drawn[1:]


def rows(
    seconds: Mapping[str, Sequence[float]],
    drawn: Sequence[Sequence[Request]],
    shares: Callable[[float, int, int], str],
) -> Iterator[str]:
    """``shares``: of the machine's limits, by seconds, prompt tokens and new tokens."""
    new = [sum(cap for _, cap in requests) for requests in drawn]
    prompts = [sum(len(prompt) for prompt, _ in requests) for requests in drawn]
    for name, taken in seconds.items():
        speeds = [tokens / one for tokens, one in zip(new, taken, strict=True)]
        ratios = [one / ours for one, ours in zip(taken, seconds[OURS], strict=True)]
        share = statistics.median_low(taken)
        at = list(taken).index(share)
        cells = (name, spread(speeds, 0), spread(ratios, 2), shares(share, prompts[at], new[at]))
        yield f"| {' | '.join(cells)} |"


def _shares(
    workload: str, parameters: int, machine: Mapping[str, float]
) -> Callable[[float, int, int], str]:
    def share(seconds: float, prompts: int, new: int) -> str:
        if workload == "alone":
            return f"{4 * parameters * new / seconds / machine['read']:.0%} of reading"
        if workload != "mixed":
            return ""  # shared prompts are computed once
        work = 2 * parameters * (prompts + new) / seconds
        return f"{work / machine['product']:.0%} of a product"

    return share


def compare(
    name: str,
    workloads: Sequence[Workload],
    slots: int,
    rounds: int,
    machine: Mapping[str, float],
    names: Sequence[str],
) -> dict[str, Any]:
    """Print the table of each workload on one model. Returns the seconds by workload and engine."""
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        parameters = models.save(name, Path(folder))
        print(f"\n## {name}: {parameters / 1e6:.0f} million parameters, {slots} slots", flush=True)
        seeds = itertools.count(1, 1000)
        with loaded(Path(folder), slots, names) as engines:
            for workload in workloads:
                seconds, drawn = measure(
                    engines, workload, models.vocabulary(name), rounds, next(seeds)
                )
                kept[workload.name] = seconds
                print(f"\n{workload.name}, {rounds} rounds, median (least to most)\n")
                print("| engine | new tokens/s | time / ours | of the machine |\n|---|---|---|---|")
                share = _shares(workload.name, parameters, machine)
                print(*rows(seconds, drawn, share), sep="\n", flush=True)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="*", choices=tuple(models.SHAPES), default=["135 M"])
    parser.add_argument("--engines", nargs="*", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--full", action="store_true", help="all models, five rounds")
    parser.add_argument("--json", type=Path, help="write the seconds of each round to this file")
    parser.add_argument("--svg", type=Path, help="draw the ratios to this file")
    options = parser.parse_args()
    if options.full:
        options.models, options.rounds = list(models.SHAPES), max(5, options.rounds)
    if OURS not in options.engines:
        parser.error(f"--engines: {OURS} is what the others are compared with: add it")
    machine = limits()
    print(f"{_processor()}, {torch.get_num_threads()} threads; reads {machine['read'] / 1e9:.1f}")
    print(f"GB/s, multiplies {machine['product'] / 1e9:.0f} GFLOP/s")
    kept: dict[str, Any] = {"limits": machine}
    for name in options.models:
        kept[name] = compare(name, ON_EVERY_MODEL, SLOTS, options.rounds, machine, options.engines)
    kept[models.GPT2] = compare(
        models.GPT2, ON_GPT2, TUTORIAL_SLOTS, options.rounds, machine, options.engines
    )
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    if options.svg:
        del kept["limits"]
        options.svg.write_text("\n".join(draw(kept)) + "\n")


# -- the picture

COLOURS = ("#1f5fbf", "#94a3b8", "#64748b", "#c2410c", "#15803d")  # in the order of KINDS
LEFT, WIDTH, BAR, GAP, TOP = 170, 520, 13, 16, 44


def draw(kept: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> Iterator[str]:
    """Bars of the median time over ours, by model and workload."""
    bars: list[tuple[str, str, float]] = []  # title of a group or "", engine, ratio
    for model, workloads in kept.items():
        for workload, seconds in workloads.items():
            title = f"{model}, {workload}"
            for name, taken in seconds.items():
                pairs = zip(taken, seconds[OURS], strict=True)
                bars.append((title, name, statistics.median(one / ours for one, ours in pairs)))
                title = ""
    scale = WIDTH / max(ratio for _, _, ratio in bars)
    height = TOP + len(bars) * BAR + GAP * sum(bool(title) for title, _, _ in bars) + 10
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 50} {height}" '
    yield 'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    yield '<text x="4" y="14">time over ours, median of the rounds: shorter is faster</text>'
    x = 4.0
    for name, colour in zip(KINDS, COLOURS, strict=True):
        yield f'<rect x="{x:.0f}" y="22" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 14:.0f}" y="31">{name}</text>'
        x += 30 + 6.2 * len(name)
    y = TOP
    for title, name, ratio in bars:
        if title:
            y += GAP
            yield f'<text x="4" y="{y + BAR - 3}">{title}</text>'
        colour = COLOURS[list(KINDS).index(name)]
        size = f'width="{ratio * scale:.1f}" height="{BAR - 2}"'
        yield f'<rect x="{LEFT}" y="{y}" {size} fill="{colour}"><title>{name}</title></rect>'
        yield f'<text x="{LEFT + ratio * scale + 4:.1f}" y="{y + BAR - 3}">{ratio:.2f}</text>'
        y += BAR
    yield "</svg>"


def _processor() -> str:
    """The name, and the instructions that matter here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in pairs}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    has = [flag for flag in wanted if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', 'a processor')} ({', '.join(has)})"


if __name__ == "__main__":
    main()
