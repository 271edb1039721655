"""A fault at each step in turn, on a real model: only the affected request ends, the others keep
their tokens.

Faults: logits that are NaN or infinite, and a forward pass that raises whenever one sequence is in
the batch.
"""

import random
from collections.abc import Mapping
from typing import Literal

import pytest
import torch

from fairlead_runtime.build.build_engine import BuiltEngine, build
from fairlead_runtime.device.sampling.host_sampler import SampledTokens, SamplingBatch, sample
from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.request.sequence import FinishReason, Request, SamplingParams
from fairlead_runtime.scheduling.plan import Result, Work
from fairlead_runtime.settings.engine_config import EngineConfig
from support import tiny
from support.fake_engine import Collected, run
from support.full import LONG_FORM

POINTS = 1000 if LONG_FORM else 100
Kind = Literal["nan", "inf", "raise"]


class Faulty:
    """A runner that fails row ``pick`` of its ``at``-th step with a fault of ``kind``."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        runner._sampler = self._sample
        self.arm(-1, "nan", 0)

    def arm(self, at: int, kind: Kind, pick: int) -> None:
        self._left, self._kind, self._pick = at, kind, pick
        self.hit: tuple[str, int] | None = None
        self._victim = -1

    def copy(self, work: Work) -> None:
        self._runner.copy(work)
        rows = [row for row in work.rows if row.samples]
        if self._left == 0 and rows:
            row = rows[self._pick % len(rows)]
            self._victim = row.sequence.id
            self.hit = row.sequence.request.id, row.sequence.choice
        self._left -= bool(rows)

    def execute(self, work: Work) -> Mapping[int, Result]:
        self._rows = [row.sequence.id for row in work.rows if row.samples]
        if self._kind == "raise" and self._victim in self._rows:
            raise torch.OutOfMemoryError("injected")
        return self._runner.execute(work)

    def _sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        if self._kind != "raise" and self._victim in self._rows:
            logits[self._rows.index(self._victim), 3] = (
                torch.nan if self._kind == "nan" else torch.inf
            )
        return sample(logits, batch)


# Each mechanism of a cache: keys of other layers and heads of several sizes, one of these, experts.
OWN = ("gemma3n_text", "mimo_v2_flash", "gpt_oss")
FAMILIES = ("llama", "gemma2", "gemma4_text")


@pytest.fixture(
    scope="module", params=[*FAMILIES, *(pytest.param(x, marks=pytest.mark.full) for x in OWN)]
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltEngine:
    path = tiny.save(tiny.build(request.param), tmp_path_factory.mktemp("model"))
    # Memory is scarce: some requests are preempted and resumed around the fault.
    return build(
        path, EngineConfig(num_blocks=28, block_size=4, max_batch_tokens=24, safety_margin=0.0)
    )


def workload() -> list[Request]:
    draw = random.Random(5)
    requests = []
    for i in range(6):
        prompt = tuple(draw.randrange(256) for _ in range(draw.randint(4, 18)))
        longest = draw.randint(8, 16)
        params = SamplingParams(
            temperature=(0.0, 1.0)[i % 2], max_tokens=longest, ignore_eos=True, n=1 + (i == 3)
        )
        requests.append(Request(f"r{i}", prompt, params, longest, seed=i))
    return requests


def serve(built: BuiltEngine) -> Collected:
    engine = built.engine
    engine._scheduler = engine._make_scheduler()
    for request in workload():
        engine.submit(request)
    collected = run(engine)
    engine._scheduler.check()
    assert engine._scheduler.stats().used == 0
    return collected


def test_a_fault_at_any_step_ends_only_the_request_it_hits(built: BuiltEngine) -> None:
    runner = built.engine._executor
    assert isinstance(runner, ModelRunner)
    faulty = Faulty(runner)
    built.engine._executor = faulty
    steps_before = built.engine.counters.steps
    expected = serve(built)
    steps = built.engine.counters.steps - steps_before
    assert all(reasons == [FinishReason.LENGTH] for reasons in expected.finish.values())
    kinds: tuple[Kind, ...] = ("nan", "inf", "raise")
    hits = 0
    for point in range(POINTS // 2):
        faulty.arm(point % steps, kinds[point % 3], point)
        got = serve(built)
        if faulty.hit is None:
            continue  # the last steps of this run computed no sampling row
        hits += 1
        assert got.finish[faulty.hit] == [FinishReason.ERROR]
        own = got.tokens.get(faulty.hit, [])
        assert own == expected.tokens[faulty.hit][: len(own)]
        for key, tokens in expected.tokens.items():
            if key != faulty.hit:
                assert got.tokens[key] == tokens
                assert got.finish[key] == expected.finish[key]
        assert not built.engine.dead_reason
    assert hits > POINTS // 4
