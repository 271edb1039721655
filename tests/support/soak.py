"""Mixed load on an engine for a stated time, and what must not have grown after it.

Requests of random lengths and all kinds of parameters, several choices, structured output, clients
that leave, and more of them than the cache holds, so that sequences are preempted. The load comes
in rounds; between two of them nothing runs, and the process is measured at rest. Knows no device:
the engine is anybody's, and a GPU is measured where torch has one.
"""

import gc
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fairlead_runtime import LLM
from fairlead_runtime.engine.engine import Engine
from fairlead_runtime.outputs import Submission
from fairlead_runtime.request.sequence import FinishReason, Request, SamplingParams

MIB = 1 << 20
# What of a process must not grow, and by how much it may: allocators keep pages of their own, and a
# thread of a library may start late.
TOLERANCE: Mapping[str, int] = {
    "taken of the GPU": 64 * MIB,
    "allocated on the GPU": MIB,
    "reserved on the GPU": 64 * MIB,
    "pinned": MIB,
    "resident": 64 * MIB,
    "open files": 0,
    "threads": 0,
}
GREEDY: dict[str, Any] = {"temperature": 0.0}
PLAIN: Mapping[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "drawn": {"temperature": 0.9},
    "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "min-p": {"temperature": 1.1, "min_p": 0.05, "min_tokens": 3},
    "several choices": {"temperature": 1.0, "n": 3},
    "penalties": {**GREEDY, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "presence": {"temperature": 0.7, "presence_penalty": 0.5, "n": 2},
    "bias": {"temperature": 0.7, "logit_bias": {5: 3.0, 40: -100.0}, "bad_words": ((9, 11),)},
    "log-probabilities": {**GREEDY, "logprobs": 3, "prompt_logprobs": 1},
    "stops": {"temperature": 1.0, "stop_token_ids": tuple(range(5, 256, 20))},
    "without an end": {**GREEDY, "ignore_eos": True},
}
GUIDED: Mapping[str, dict[str, Any]] = {
    "a regex": {"structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{3,9}){0,6}"}},
    "a choice": {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}, **GREEDY},
    "a schema": {
        "structured_outputs": {
            "json": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}},
                "required": ["n", "b"],
                "additionalProperties": False,
            }
        }
    },
}

# The parameters and the ids of a prompt become a request.
Make = Callable[[list[int], SamplingParams], Request]


def footprint() -> dict[str, int]:
    """Bytes and counts of this process, under the names of TOLERANCE."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "open files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        pinned = torch.cuda.host_memory_stats()
        # Of whoever uses it: graphs, libraries and the driver, too, which torch does not count.
        free, total = torch.cuda.mem_get_info()
        found["taken of the GPU"] = total - free
        found["allocated on the GPU"] = torch.cuda.memory_allocated()
        found["reserved on the GPU"] = torch.cuda.memory_reserved()
        found["pinned"] = int(pinned.get("active_bytes.current", 0))
    return found


def growth(samples: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, int]]:
    """What has grown beyond its tolerance, with its level early and late.

    The first third is the time in which caches fill. A level is the middle of a third's samples:
    one that is high by chance is no growth. Raises ValueError for fewer than six samples.
    """
    if len(samples) < 6:
        raise ValueError(f"{len(samples)} samples are too few to see growth")
    third = len(samples) // 3
    early, late = samples[third : 2 * third], samples[-third:]
    found = {}
    for name, tolerance in TOLERANCE.items():
        if name not in samples[0]:
            continue
        before, after = (
            int(statistics.median(sample[name] for sample in part)) for part in (early, late)
        )
        if after - before > tolerance:
            found[name] = before, after
    return found


@dataclass
class Report:
    """What ran: requests by kind, ends by reason, and a footprint after each round."""

    kinds: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    samples: list[dict[str, int]] = field(default_factory=list)

    def __str__(self) -> str:
        first, last = self.samples[0], self.samples[-1]
        grown = "; ".join(f"{name} {first[name]} to {last[name]}" for name in last)
        return (
            f"{len(self.samples)} rounds, {sum(self.kinds.values())} requests, {self.tokens} "
            f"tokens, ends {dict(self.ends)}; {grown}"
        )


@dataclass
class Soak:
    """The load. ``engine`` is idle, and ``step`` its only thread; ``vocabulary``: ids from 3 to
    this one are in prompts, at most ``longest`` of them, and outputs are at most ``output`` long.
    """

    engine: Engine
    make: Make
    kinds: Mapping[str, dict[str, Any]]
    vocabulary: int
    longest: int
    output: int
    concurrency: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._open: dict[str, set[int]] = {}  # choices of each request that have not ended
        self._shared = self._ids(self.longest // 2)
        self._names = self._endless()

    def run(self, seconds: float, per_round: int = 64, least: int = 6) -> Report:
        """Rounds of ``per_round`` requests until the time is over, at least ``least``."""
        report, ends = Report(), time.monotonic() + seconds
        while time.monotonic() < ends or len(report.samples) < least:
            self._round(report, per_round)
            report.samples.append(footprint())
        return report

    def _round(self, report: Report, count: int) -> None:
        left = count
        while left or self._open:
            while left and len(self._open) < self.concurrency:
                self._submit(report)
                left -= 1
            self._take(report)
            if self._open and self._random.random() < 0.02:
                self.engine.abort(self._random.choice(list(self._open)))
        while not self.engine.idle:
            self._take(report)

    def _take(self, report: Report) -> None:
        events = self.engine.step()
        for event in events:
            report.tokens += event.token is not None
            if event.finish is not None:
                report.ends[event.finish.value] += 1
                if event.finish is FinishReason.ERROR:
                    report.errors.append(str(event.failure))
                open_choices = self._open[event.request_id]
                open_choices.discard(event.choice)
                if not open_choices:
                    del self._open[event.request_id]
        if self.engine.dead_reason:
            raise RuntimeError(self.engine.dead_reason)
        if self.engine.idle and self._open and not events:
            self.engine.sleep()  # until a grammar is compiled

    def _submit(self, report: Report) -> None:
        name = next(self._names)
        params = SamplingParams(max_tokens=self._random.randint(4, self.output), **self.kinds[name])
        request = self.make(self._prompt(), params)
        self.engine.submit(request)
        self._open[request.id] = set(range(params.n))
        report.kinds[name] += 1

    def _prompt(self) -> list[int]:
        """A third begins with the same tokens."""
        if self._random.random() < 1 / 3:
            return self._shared + self._ids(self._random.randint(1, self.longest // 4))
        return self._ids(self._random.randint(1, self.longest))

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(3, self.vocabulary) for _ in range(count)]

    def _endless(self) -> Iterator[str]:
        """Every kind comes as often as every other, in random order."""
        while True:
            names = list(self.kinds)
            self._random.shuffle(names)
            yield from names


def maker(llm: LLM) -> Make:
    """Requests as ``generate`` makes them."""

    def make(prompt: list[int], params: SamplingParams) -> Request:
        return llm._checked(Submission(prompt=prompt, params=params))

    return make


def check(report: Report, engine: Engine, kinds: Mapping[str, object]) -> None:
    """Everything ran, nothing failed, no block is held, and nothing has grown."""
    stats, counters = engine.snapshot().scheduler, engine.snapshot().counters
    print(f"{report}; {stats.preemptions} preemptions, {stats.offloads} offloads")
    assert report.errors == []
    assert counters.engine_faults == counters.failed_sequences == counters.step_failures == 0
    assert set(report.kinds) == set(kinds)
    assert {"stop", "length", "abort"} <= set(report.ends)
    assert stats.preemptions > 0
    assert stats.used == stats.running == stats.waiting == 0
    assert stats.free + stats.cached == stats.units
    assert growth(report.samples) == {}
