"""Asynchronous and synchronous steps of a real model give the same texts, byte for byte, whatever
the workload: stops, clients that leave, preemption, offload, prefix hits, several choices, draws.

On the stand-ins of flashinfer's wrappers or Triton's kernels, and of CUDA graphs, whose tapes are
replayed with what the step has on the device, so that a token of another step or a row that is not
there shows; and of two streams, of which the one that offloads is late.
"""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_runtime.device.sampling.device_sampler import RowSampler
from fairlead_runtime.device.sampling.token_readback import TokenReadback
from fairlead_runtime.device.step.decode_steps import DecodeSteps
from fairlead_runtime.device.step.mixed_steps import MixedSteps
from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.engine.engine import Bounds, Engine
from fairlead_runtime.request.sequence import FinishReason, Request, SamplingParams
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.scheduling.scheduler import Scheduler, SchedulerStats
from support import tiny_guides
from support.bad_steps import BadSteps
from support.engine_rig import EOS, Rig, Setting, prompts, rig
from support.fake_engine import Clock, Collected
from support.full import LONG_FORM
from support.tiny_guides import ASKED, GUIDES

# With states, on plain torch: one of each kind of state, also beside keys in one layer.
_MORE = ("nemotron_h", "lfm2", "falcon_h1", "minimax")
WITH_STATES = (
    "qwen3_5_text on torch",
    "falcon_mamba on torch",
    *(pytest.param(f"{name} on torch", marks=pytest.mark.full) for name in _MORE),
)
FAMILIES = ("llama", "gemma2", "gemma2 on Triton", "gemma2 on ranks", *WITH_STATES)
LENGTHS, SHARED = (9, 21, 30, 14, 25), 12
IDS = tuple(range(40, 56))
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "logprobs": 1},
    {"temperature": 0.9, "frequency_penalty": 0.6, "presence_penalty": -0.2, "min_tokens": 3},
    {"temperature": 0.0, "logit_bias": {7: 2.0, 9: -4.0}, "bad_words": ((11,),), "logprobs": 5},
    {"temperature": 1.0, "top_k": 9, "allowed_token_ids": (*range(40, 90), 125), "min_tokens": 2},
    # Masks from the host, which needs the tokens before.
    {"temperature": 0.0, "bad_words": tuple((i, j) for i in IDS for j in IDS[1::2])}
    | {"allowed_token_ids": IDS},
    {"temperature": 1.0, "structured_outputs": ASKED["json"], "min_tokens": 4},
    {"temperature": 0.9, "structured_outputs": ASKED["choice"], "presence_penalty": 0.3},
    {"temperature": 0.0, "structured_outputs": ASKED["regex"], "logprobs": 2},
)
# Of log-probabilities: steps of other rows may round the logits otherwise, by 1.03e-5 between two
# ranks on a processor with AVX-512. Those of another token differ by 1e-3 and more.
NEAR = 5e-5
# Tokens of which each ends about one text in four.
STOP_IDS, STOP_TEXT = tuple(range(5, 256, 40)), 11


@dataclass(frozen=True)
class Client:
    """One request: when it arrives, which tokens it asks for, and when it leaves, if it does."""

    arrives: int
    place: int  # of its prompt
    params: dict[str, Any]
    max_tokens: int
    n: int
    stop_ids: bool
    stop_text: bool  # the service ends a choice that has STOP_TEXT
    leaves: int | None

    def request(self, name: str, family: str) -> Request:
        prompt = prompts(len(family), LENGTHS, SHARED)[self.place]
        params = SamplingParams(
            max_tokens=self.max_tokens,
            n=self.n,
            stop_token_ids=STOP_IDS if self.stop_ids else (),
            **self.params | {"min_tokens": min(self.params.get("min_tokens", 0), self.max_tokens)},
        )
        seed = self.place + 10 * self.max_tokens
        ends = EOS if params.guided is None else tiny_guides.EOS
        return Request(name, prompt, params, self.max_tokens, seed=seed, eos_ids=ends)


CLIENTS = st.builds(
    Client,
    arrives=st.integers(0, 12),
    place=st.integers(0, len(LENGTHS) - 1),
    params=st.sampled_from(PARAMS),
    max_tokens=st.integers(1, 24),
    n=st.sampled_from((1, 1, 2)),
    stop_ids=st.booleans(),
    stop_text=st.booleans(),
    leaves=st.none() | st.integers(2, 30),
)
SETTINGS = st.builds(
    Setting,
    block_size=st.just(4),
    chunk=st.sampled_from((16, 64)),
    num_blocks=st.sampled_from((16, 24, 200)),
    offload=st.booleans(),
    sharing=st.booleans(),
    max_requests=st.sampled_from((2, 4)),
    graphs=st.sampled_from((2, 32)),
    # Short lists: some rows are the host's, whose steps wait for each other.
    listed=st.sampled_from((None, None, 12)),
    side=st.integers(0, 3),
)


def rig_of(family: str) -> Rig:
    """With flashinfer's attention, or Triton's; without graphs on two ranks and in torch."""
    name, _, on = family.partition(" on ")
    kernels = {"": "graphs", "Triton": "triton graphs", "ranks": "ranks ahead", "torch": "ahead"}
    return rig(name, kernels[on])


@functools.cache
def kept_runner(family: str, setting: Setting) -> ModelRunner:
    """As an engine's is, with the rows and graphs of the runs before."""
    return rig_of(family).runner(setting, GUIDES)


def runner_of(family: str, setting: Setting) -> ModelRunner:
    """Another rank has one cache, which it allocates anew."""
    if family.endswith("ranks"):
        return rig_of(family).runner(setting, GUIDES)
    return kept_runner(family, setting)


class Counted:
    """The runner as the engine's device; counts launches beside another step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.flying = self.ahead = self.launched = 0

    def launches(self, rows: Any) -> bool:
        return self._runner.launches(rows)

    def launch(self, work: Work) -> Any:
        collect = self._runner.launch(work)
        self.launched += 1
        self.ahead += bool(self.flying)
        self.flying += 1

        def counted() -> Any:
            self.flying -= 1
            return collect()

        return counted


class Played(NamedTuple):
    """What the clients got, how many steps were launched beside another, and what happened."""

    got: Collected
    ahead: int
    stats: SchedulerStats


def play(
    family: str,
    setting: Setting,
    clients: list[Client],
    *,
    ahead: bool,
    executor: Callable[[ModelRunner], Any] = lambda runner: runner,
) -> Played:
    """``executor``: what runs the steps that are not launched."""
    groups = rig_of(family).groups
    runner = runner_of(family, setting)
    device = Counted(runner)
    limits = rig_of(family).limits(setting)
    engine = Engine(
        lambda: Scheduler(limits, groups, b"rig"),
        executor(runner),
        Bounds.of(limits, max_queue=1024, queue_timeout=60.0),
        now=Clock(),
        launcher=device if ahead else None,
        prepare=lambda outputs, done: done(GUIDES.compile(outputs)),
    )
    got = Collected()
    stopped: set[tuple[str, int]] = set()
    for step in range(4000):
        for i, client in enumerate(clients):
            if client.arrives == step:
                engine.submit(client.request(f"{i}", family))
            if client.leaves is not None and client.arrives + client.leaves == step:
                engine.abort(f"{i}")
        got.take(engine.step())
        for (name, choice), tokens in got.tokens.items():
            ends = clients[int(name)].stop_text and STOP_TEXT in tokens
            if ends and (name, choice) not in stopped:
                stopped.add((name, choice))
                engine.finish(name, choice)
        if step % 4 == 0:
            engine._scheduler.check()
        if engine.idle and step > max(client.arrives for client in clients):
            break
    stats = engine.snapshot().scheduler
    assert stats.used == device.flying == 0
    assert engine.counters.engine_faults == engine.counters.failed_sequences == 0
    assert engine.counters.steps_launched == device.launched
    assert engine.counters.generated_tokens == sum(map(len, got.tokens.values()))
    return Played(got, device.ahead, stats)


def compare(family: str, setting: Setting, clients: list[Client]) -> int:
    stay = [replace(c, leaves=None) for c in clients]
    want, *_ = play(family, setting, stay, ahead=False)
    got, ahead, _ = play(family, setting, clients, ahead=True)
    for i, client in enumerate(clients):
        for choice in range(client.n):
            key = f"{i}", choice
            mine, other = got.tokens.get(key, []), want.tokens[key]
            assert len(got.logprobs.get(key, mine)) == len(mine)
            for one, wanted in zip(
                got.logprobs.get(key, ()), want.logprobs.get(key, ()), strict=False
            ):
                assert one.token == wanted.token
                assert one.logprob == pytest.approx(wanted.logprob, abs=NEAR)
                assert one.top_logprobs == pytest.approx(wanted.top_logprobs, abs=NEAR)
            if got.finish[key] == [FinishReason.ABORT]:
                assert mine == other[: len(mine)]
            else:
                assert (mine, got.finish[key]) == (other, want.finish[key])
    return ahead


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_the_same_whether_steps_are_launched_ahead_or_not(family: str) -> None:
    @settings(max_examples=150 if LONG_FORM else 3, deadline=None, derandomize=not LONG_FORM)
    @given(setting=SETTINGS, clients=st.lists(CLIENTS, min_size=2, max_size=5))
    def any_workload(setting: Setting, clients: list[Client]) -> None:
        compare(family, setting, clients)

    any_workload()


# Every pair of family, the first client's parameters and offload; in the long form every triple.
@pytest.mark.parametrize(
    ("family", "first", "offload"),
    [
        pytest.param(*case, marks=[pytest.mark.full] * (sum(map(bool, case[1:])) % 2 != n))
        for n, family in enumerate(("llama", "llama on ranks"))
        for case in itertools.product((family,), (0, 6), (False, True))
    ],
)
def test_a_workload_with_all_of_it(family: str, first: int, *, offload: bool) -> None:
    """Few blocks, so that sequences are preempted, stops in flight, a client that leaves."""
    rng = random.Random(3)
    clients = [
        Client(
            i,
            i % len(LENGTHS),
            PARAMS[(i + first) % len(PARAMS)],
            20,
            1 + i % 2,
            stop_ids=i % 3 == 0,
            stop_text=i % 3 == 1,
            leaves=rng.choice((None, 9)),
        )
        for i in range(6)
    ]
    setting = Setting(block_size=4, chunk=64, num_blocks=24, offload=offload, max_requests=4)
    assert compare(family, setting, clients) > 10


@pytest.mark.parametrize("at", ["launch", "launch beside a prompt", "draw", "collect"])
def test_a_launched_step_that_fails_on_the_device_leaves_the_texts_as_they_are(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Its rows on the device are made anew from what the host knows."""
    clients = [
        Client(0, i % 5, params, 16, 1, stop_ids=True, stop_text=False, leaves=None)
        for i, params in enumerate(PARAMS[4:])
    ]
    beside = at == "launch beside a prompt"
    chunk = 8 if beside else 4096
    setting = Setting(block_size=4, chunk=chunk, num_blocks=200, max_requests=8, graphs=0)
    owner, name = {
        "launch": (DecodeSteps, "_compute"),
        "launch beside a prompt": (MixedSteps, "_queue"),
        "draw": (RowSampler, "draw"),
        "collect": (TokenReadback, "wait"),
    }[at]
    whole, calls = getattr(owner, name), 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        out = whole(*arguments)
        if calls % 5 == 4:
            raise RuntimeError("planted")
        return out

    want, *_ = play("llama", setting, clients, ahead=False)
    monkeypatch.setattr(owner, name, failing)
    got, ahead, _ = play("llama", setting, clients, ahead=True)
    assert got.tokens == want.tokens
    assert got.finish == want.finish
    assert calls > 8
    assert ahead > 4


@pytest.mark.parametrize("at", ["launch", "collect"])
@pytest.mark.parametrize("family", WITH_STATES)
def test_bad_steps_in_flight_leave_the_greedy_texts_of_states_as_generate_has_them(
    monkeypatch: pytest.MonkeyPatch, family: str, at: str
) -> None:
    """In too little memory: a step fails when it is launched or when its tokens are taken, once it
    has written its states, and so do steps that are computed again.
    """
    owner, name = {"launch": (MixedSteps, "_queue"), "collect": (TokenReadback, "wait")}[at]
    clients = [
        Client(i, i % 5, PARAMS[0], 24, 1 + i % 2, stop_ids=False, stop_text=False, leaves=None)
        for i in range(5)
    ]
    offload = at == "launch"
    setting = Setting(block_size=4, chunk=13, num_blocks=16, offload=offload, max_requests=4)
    whole, calls = getattr(owner, name), 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        out = whole(*arguments)
        if calls % 4 == 3:
            raise RuntimeError("planted")
        return out

    devices: list[BadSteps] = []

    def bad(runner: ModelRunner) -> BadSteps:
        devices.append(BadSteps(runner))
        return devices[0]

    monkeypatch.setattr(owner, name, failing)
    got, ahead, stats = play(family, setting, clients, ahead=True, executor=bad)
    engine = rig_of(family)
    for i, client in enumerate(clients):
        prompt = prompts(len(family), LENGTHS, SHARED)[client.place]
        for choice in range(client.n):
            assert got.tokens[f"{i}", choice] == engine.reference(prompt, client.max_tokens)
    assert ahead > 4
    assert devices[0].failed > 1
    # States alone do not grow.
    assert (stats.preemptions > 0 and (stats.offloads > 0) == offload) or not engine.groups
