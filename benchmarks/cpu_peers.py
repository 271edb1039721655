"""Engines of other projects beside ours, on the same models and the same CPUs.

Each engine is a process in an environment of its own, made from the package registry and kept
(`benchmarks/peers.py`). All have the model loaded and take turns, the order changing from round to
round, after a warm-up; no prompt comes twice, so no cache has it. Compare the ratios: the time of
another engine over ours in the same round. An engine that takes over twice as long as ours in the
first round does not run in the others; with --full, over three times as long.

- mixed: 64 requests at once, prompts of 16 to 256 tokens, 16 to 128 new tokens; 32 on the models
  whose layers keep states.
- tutorial: six requests with caps of 6, 50, 300, 30, 180 and 45 in three slots, GPT-2.
- burst: 8 or 32 requests at once that share their first 512 tokens.
- alone: one request, whose decode reads all weights for each token.
- long prompt: one of 2,048 tokens arrives among eight decodes, over HTTP (`long_prompt.py`).
- conversations: the forty of tests/functional/real_weights at once, and one alone, on SmolLM2's
  published weights: real prompts, answers as long as the model's own are. Each engine in float32
  and with 8-bit weights, ours in bfloat16, too; ratios are to ours in float32.

Weights and cache are float32; mixed and alone come again with 8-bit weights, on the models with
states in bfloat16, as these are published: so their files are, and ours holds matrices in 16 bits
in float32, too, which it widens to the same numbers. The output names what else an engine rounds:
each has its own default, which is its fastest. Prompts that share no text make llama.cpp give each
request a cache of its own, others share one (`llama_engine.py`).

Beside them stand the machine's own limits, measured in the same run: of alone and the tutorial the
share of the memory bandwidth that the weights of each step take, of mixed the share of a large
float32 product's rate.

    .venv/bin/python -m benchmarks.cpu_peers [--full] [--models "15 M" SmolLM2] [--svg FILE]
"""

import argparse
import functools
import heapq
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks import cpu_picture, long_prompt, machine, models, peers
from benchmarks.cpu_engine import Request
from benchmarks.http_peers import spread
from benchmarks.turns import OURS, Terms, rounds_of, take_turns
from transformers import AutoTokenizer

from support import real_answers  # its folder is on the path since `peers`

SLOTS = 64
TUTORIAL_CAPS, TUTORIAL_SLOTS = (6, 50, 300, 30, 180, 45), 3
SHARED, OWN, ANSWER = 512, 16, 32  # tokens of a burst's requests
ALONE = 64  # new tokens
WARM = 8  # new tokens of each request in the warm-up
PATIENCE, PATIENCE_OF_ALL = 2.0, 3.0


class Kind(NamedTuple):
    """An engine: its name in ``cpu_engine.py``, its interpreter, its versions, and the bytes of a
    weight in its layers and in its head.
    """

    name: str
    python: Callable[[], str]
    versions: Callable[[], str]
    weight: tuple[float, float] = (4, 4)

    @classmethod
    def of(cls, name: str, peer: peers.Peer, weight: tuple[float, float] = (4, 4)) -> "Kind":
        return cls(name, lambda: str(peer.programs() / "python"), peer.versions, weight)

    def reads(self, size: models.Size) -> float:
        """Bytes of the weights that every step reads."""
        return size.layers * self.weight[0] + size.head * self.weight[1]


def _our_versions() -> str:
    return f"fairlead {version('fairlead')}, torch {version('torch')}"


FLOAT32 = {
    OURS: Kind("fairlead", lambda: sys.executable, _our_versions),
    "transformers, static batches": Kind.of("transformers-static", peers.TRANSFORMERS),
    "transformers, continuous batching": Kind.of("transformers-continuous", peers.TRANSFORMERS),
    "OpenVINO GenAI": Kind.of("openvino", peers.OPENVINO),
    "vLLM on CPU": Kind.of("vllm", peers.VLLM),
    "llama.cpp": Kind.of("llama.cpp", peers.LLAMA_CPP),
}
# The models with states are stored in bfloat16, and ours holds matrices so in float32, too.
STORED_HALF = FLOAT32 | {OURS: FLOAT32[OURS]._replace(weight=(2, 2))}
# vLLM's CPU build takes 8-bit weights of dense models from converted checkpoints only.
INT8 = {
    OURS: Kind("fairlead-int8", lambda: sys.executable, _our_versions, (1, 1)),
    "OpenVINO GenAI": Kind.of("openvino-int8", peers.OPENVINO, (1, 1)),
    # A block of 32 weights has a scale of 2 bytes.
    "llama.cpp": Kind.of("llama.cpp-int8", peers.LLAMA_CPP, (34 / 32, 34 / 32)),
}
# Of models whose layers keep states: what each engine adds up in is its own choice.
BFLOAT16 = {
    OURS: Kind("fairlead-bfloat16", lambda: sys.executable, _our_versions, (2, 2)),
    "transformers, static batches": Kind.of(
        "transformers-static-bfloat16", peers.TRANSFORMERS, (2, 2)
    ),
    "vLLM on CPU": Kind.of("vllm-bfloat16", peers.VLLM, (2, 2)),
    "llama.cpp": Kind.of("llama.cpp-bfloat16", peers.LLAMA_CPP, (2, 2)),
}
# All on the same weights: those in float32 have the published ones.
REAL = {
    **{name: kind for name, kind in FLOAT32.items() if not name.startswith("vLLM")},
    f"{OURS}, bfloat16": Kind("fairlead-bfloat16", lambda: sys.executable, _our_versions, (2, 2)),
    **{f"{name}, int8": kind for name, kind in INT8.items()},
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
                start_new_session=True,
            )
        self.settings: str = self._read()["settings"]

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


def mixed(draw: random.Random, vocabulary: int, count: int = 64) -> list[Request]:
    return [
        (_text(draw, vocabulary, draw.randint(16, 256)), draw.randint(16, 128))
        for _ in range(count)
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


@functools.cache
def _spoken() -> list[tuple[list[dict[str, str]], int]]:
    """Conversations, each with the number of tokens of the model's own answer."""
    lengths = [len(answer.tokens) for answer in real_answers.Answer.read()]
    return list(zip(real_answers.conversations(), lengths, strict=True))


@functools.cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(models.published())


def conversations(draw: random.Random, _vocabulary: int) -> list[Request]:
    """With the number of a day before the first message: no cache has them."""
    day = draw.randrange(10**6)
    requests = []
    for (first, *more), length in _spoken():
        dated = {**first, "content": f"This is day {day}. {first['content']}"}
        requests.append((real_answers.prompt_of(_tokenizer(), [dated, *more]), length))
    return requests


def one_conversation(draw: random.Random, vocabulary: int) -> list[Request]:
    """One with a long answer."""
    few = [one for one in conversations(draw, vocabulary) if one[1] >= ALONE]
    return [draw.choice(few)]


ON_EVERY_MODEL = (
    Workload("mixed", mixed),
    Workload("burst of 8", burst(8)),
    Workload("burst of 32", burst(32)),
    Workload("alone", alone),
)
ON_GPT2 = (Workload("tutorial", tutorial),)
ON_REAL_WEIGHTS = (
    Workload("conversations", conversations),
    Workload("alone, a conversation", one_conversation),
)
mixed_of_32 = functools.partial(mixed, count=32)
ON_STATES = (Workload("mixed of 32", mixed_of_32), Workload("alone", alone))
IN_BFLOAT16 = (
    Workload("mixed of 32, bfloat16", mixed_of_32),
    Workload("alone, bfloat16", alone),
)
IN_INT8 = (Workload("mixed, int8 weights", mixed), Workload("alone, int8 weights", alone))


# -- the run


@contextmanager
def loaded(model: Path, slots: int, kinds: Mapping[str, Kind]) -> Iterator[dict[str, Engine]]:
    """All engines that load; says why another does not."""
    with ExitStack() as stack:
        found: dict[str, Engine] = {}
        for name, kind in kinds.items():
            try:
                versions = kind.versions()
                engine = Engine(kind, model, slots, model / f"{kind.name}.log")
            except (AssertionError, RuntimeError) as error:
                print(f"{name}: left out, {error}", flush=True)
                continue
            stack.callback(engine.close)
            print(f"{name}: {versions}{engine.settings and '; '}{engine.settings}", flush=True)
            found[name] = engine
        yield found


class Measured(NamedTuple):
    """Of each round after the warm-up the requests, and the seconds of each engine that ran."""

    drawn: Sequence[Sequence[Request]]
    seconds: Mapping[str, Sequence[float]]


def measure(
    engines: Mapping[str, Engine], workload: Workload, vocabulary: int, terms: Terms, seed: int
) -> Measured:
    rounds = range(terms.rounds + 1)
    drawn = [workload.requests(random.Random(seed + at), vocabulary) for at in rounds]
    drawn[0] = [(prompt, min(cap, WARM)) for prompt, cap in drawn[0]]
    seconds = take_turns(
        list(engines), terms, workload.name, lambda name, at: engines[name].run(drawn[at]), float
    )
    return Measured(drawn[1:], seconds)


def rows(
    measured: Measured, shares: Callable[[str, float, Sequence[Request]], str]
) -> Iterator[str]:
    """``shares``: of the machine's limits, by engine, seconds and requests."""
    new = [sum(cap for _, cap in requests) for requests in measured.drawn]
    ours = measured.seconds[OURS]
    for name, taken in measured.seconds.items():
        speeds = [tokens / one for tokens, one in zip(new, taken, strict=False)]
        ratios = [one / own for one, own in zip(taken, ours, strict=False)]
        middle = statistics.median_low(taken)
        share = shares(name, middle, measured.drawn[list(taken).index(middle)])
        once = rounds_of(taken, ours)
        yield f"| {name}{once} | {spread(speeds, 0)} | {spread(ratios, 2)} | {share} |"


def steps_of(caps: Sequence[int], slots: int) -> int:
    """The fewest steps in which requests that start in order can have ``caps`` new tokens each, a
    token a step, when at most ``slots`` run at a time.
    """
    ends = [0] * slots
    for cap in caps:
        heapq.heapreplace(ends, ends[0] + cap)
    return max(ends)


def _shares(
    workload: str, size: models.Size, limits: machine.Limits, kinds: Mapping[str, Kind]
) -> Callable[[str, float, Sequence[Request]], str]:
    def share(name: str, seconds: float, requests: Sequence[Request]) -> str:
        new = sum(cap for _, cap in requests)
        if workload.startswith(("alone", "tutorial")):
            steps = new if workload != "tutorial" else steps_of(TUTORIAL_CAPS, TUTORIAL_SLOTS)
            return f"{kinds[name].reads(size) * steps / seconds / limits.read:.0%} of reading"
        if not workload.startswith("mixed"):
            return ""  # shared prompts are computed once
        tokens = new + sum(len(prompt) for prompt, _ in requests)
        work = 2 * (size.layers * tokens + size.head * new) / seconds
        return f"{work / limits.product:.0%} of a product"

    return share


class Part(NamedTuple):
    """Workloads and the engines that run them, all loaded at the same time."""

    workloads: Sequence[Workload]
    kinds: Mapping[str, Kind]


ON_SHAPES = (Part(ON_EVERY_MODEL, FLOAT32), Part(IN_INT8, INT8))
# By model: what runs on it, and the slots.
PARTS: Mapping[str, tuple[Sequence[Part], int]] = {
    **dict.fromkeys(models.SHAPES, (ON_SHAPES, SLOTS)),
    **dict.fromkeys(
        models.STATES_BESIDE_PEERS,
        ((Part(ON_STATES, STORED_HALF), Part(IN_BFLOAT16, BFLOAT16)), 32),
    ),
    models.GPT2: ([Part(ON_GPT2, FLOAT32)], TUTORIAL_SLOTS),
    models.SMOLLM2: ([Part(ON_REAL_WEIGHTS, REAL)], SLOTS),
}


class Comparison(NamedTuple):
    """``engines``: the names of those that take part."""

    engines: Sequence[str]
    terms: Terms
    limits: machine.Limits

    def of(self, name: str, parts: Sequence[Part], slots: int) -> dict[str, Any]:
        """Print the table of each workload on one model. Returns the seconds by workload and
        engine.
        """
        kept: dict[str, Any] = {}
        seeds = itertools.count(1, 1000)
        with tempfile.TemporaryDirectory() as folder:
            size = models.save(name, Path(folder))
            print(f"\n## {name}: {size.total / 1e6:.0f} million parameters, {slots} slots\n")
            for workloads, kinds in parts:
                names = tuple(self.engines)
                wanted = {one: kind for one, kind in kinds.items() if one.startswith(names)}
                with loaded(Path(folder), slots, wanted) as engines:
                    for workload in workloads if OURS in engines else ():
                        vocabulary = models.vocabulary(name)
                        measured = measure(engines, workload, vocabulary, self.terms, next(seeds))
                        kept[workload.name] = measured.seconds
                        self._print(workload.name, measured, size, kinds)
            if name in models.SHAPES:  # GPT-2 takes no prompt of that length
                kept |= long_prompt.compare(Path(folder), self.engines, self.terms)
        return kept

    def _print(
        self, workload: str, measured: Measured, size: models.Size, kinds: Mapping[str, Kind]
    ) -> None:
        print(f"\n{workload}, {self.terms.rounds} rounds, median (least to most)\n")
        print("| engine | new tokens/s | time / ours | of the machine |\n|---|---|---|---|")
        share = _shares(workload, size, self.limits, kinds)
        print(*rows(measured, share), sep="\n", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="*", choices=tuple(PARTS))
    parser.add_argument("--engines", nargs="*", choices=tuple(FLOAT32), default=list(FLOAT32))
    parser.add_argument(
        "--full",
        action="store_true",
        help="all models that --models does not leave out, five rounds, and in each the engines up "
        "to three times as slow",
    )
    parser.add_argument("--json", type=Path, help="write the seconds of each round to this file")
    parser.add_argument("--svg", type=Path, help="draw the ratios to this file")
    options = parser.parse_args()
    if options.models is None:
        options.models = list(PARTS) if options.full else ["135 M", models.GPT2, models.SMOLLM2]
    if options.full:
        options.rounds = max(5, options.rounds)
    if OURS not in options.engines:
        parser.error(f"--engines: {OURS} is what the others are compared with: add it")
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no engine stays behind
    options = _options()
    limits = machine.limits()
    print(f"{machine.processor()}, {torch.get_num_threads()} threads; reads", end=" ")
    print(f"{limits.read / 1e9:.1f} GB/s by {limits.by},", end=" ")
    print(f"multiplies {limits.product / 1e9:.0f} GFLOP/s", flush=True)
    patience = PATIENCE_OF_ALL if options.full else PATIENCE
    terms = Terms(options.rounds, patience, machine.wait_until_idle)
    comparison = Comparison(options.engines, terms, limits)
    kept: dict[str, Any] = {}
    for name in options.models:
        try:
            kept[name] = comparison.of(name, *PARTS[name])
        except pytest.skip.Exception as error:  # its weights cannot be fetched
            print(f"{name}: left out, {error}", flush=True)
        if options.json:  # of an hour that is interrupted, what was measured
            found = {"limits": limits._asdict(), **kept}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.svg:
        options.svg.write_text("\n".join(cpu_picture.draw(kept)) + "\n")


if __name__ == "__main__":
    main()
