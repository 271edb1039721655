"""Steps of decodes alone on a tiny model: which rows they take, what a failed one leaves, and that
sampled text is the general mode's.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fairlead_kernels.sampling import sample_rows
from fairlead_kernels.sampling.sample_rows import RowParameters
from fairlead_runtime.device.model.table_rows import Growth
from fairlead_runtime.device.sampling.host_sampler import NON_FINITE
from fairlead_runtime.device.sampling.sampling_mode import (
    GENERAL,
    GREEDY,
    HEAVIEST,
    DrawKind,
    SamplingMode,
)
from fairlead_runtime.device.sampling.sequence_table import SequenceTable
from fairlead_runtime.device.step.decode_steps import DecodeSteps, is_decode
from fairlead_runtime.device.step.model_runner import ModelRunner
from fairlead_runtime.engine.isolate import run_isolated
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Finished, Row, Token, Work
from fairlead_runtime.scheduling.scheduler import Scheduler
from support.engine_rig import EOS, Rig, Setting, greedy, rig
from support.graph_standin import Tape, TapeRecorder

SETTING = Setting(block_size=4, num_blocks=300, max_requests=16)
FEW = replace(SETTING, max_requests=8)
# Of log-probabilities: padded steps may round the logits otherwise.
NEAR = 1e-5
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 1.0, "min_p": 0.02, "n": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.4, "logprobs": 20},
    {"temperature": 0.0, "logit_bias": {5: -3.0, 77: 2.5}, "min_tokens": 5, "logprobs": 0},
    {"temperature": 1.0, "top_k": 9, "allowed_token_ids": (*range(40, 90),), "bad_words": ((50,),)},
    {"temperature": 0.0, "min_tokens": 9, "n": 2},
)
PLAIN = 4  # requests of which none changes logits or wants log-probabilities
# Of sixteen tokens the odd ones may not follow another.
FEW_IDS = tuple(range(40, 56))
PAIRS = tuple((one, other) for one in FEW_IDS for other in FEW_IDS[1::2])
AFTER_PAIRS: dict[str, Any] = {"bad_words": PAIRS, "allowed_token_ids": FEW_IDS}
# The first ends before the others, which go on in steps without masks.
MASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "bad_words": ((50,), (60, 61)), "max_tokens": 7},
    {"temperature": 0.0, **AFTER_PAIRS, "max_tokens": 9},
    {"temperature": 0.9, "top_p": 0.9, **AFTER_PAIRS, "min_tokens": 9, "n": 2},
    {"temperature": 0.8, "frequency_penalty": 0.5, **AFTER_PAIRS, "logprobs": 3},
)
# The first has too long a list for the device and ends before the others, which go on there.
PENALIZED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "allowed_token_ids": (*range(40, 90),), "max_tokens": 9},
    {"temperature": 0.0, "frequency_penalty": 1.5, "max_tokens": 20},
    {"temperature": 0.0, "presence_penalty": 1.5, "max_tokens": 20},
)


def requests(*asked: dict[str, Any]) -> list[Request]:
    return [
        Request(
            f"{i}",
            tuple(range(7 + i, 20 + 3 * i)),
            SamplingParams(**{"max_tokens": 12 + i, "ignore_eos": True} | params),
            params.get("max_tokens", 12 + i),
            seed=i,
            eos_ids=EOS,
        )
        for i, params in enumerate(asked)
    ]


def texts(
    engine: Rig, asked: list[Request], setting: Setting = SETTING, *, fail: bool = False
) -> dict[tuple[str, int], Any]:
    """The tokens and log-probabilities of each choice. With ``fail`` the seventh step of decodes
    fails after the device has done it, as a whole and then its first half.
    """
    scheduler = Scheduler(setting.limits(len(engine.groups)), engine.groups, b"rig")
    runner = engine.runner(setting)
    steps, made = runner._decodes, 0
    if fail:
        assert steps is not None
        advance = steps.table.advance

        def fail_some(index: torch.Tensor, tokens: torch.Tensor, *, counts: bool) -> None:
            nonlocal made
            advance(index, tokens, counts=counts)
            made += 1
            if made in (7, 8):
                raise RuntimeError("planted")

        steps.table.advance = fail_some  # type: ignore[method-assign]
    for request in asked:
        scheduler.add(request)
    out: dict[tuple[str, int], Any] = {}
    while scheduler.has_work:
        work = scheduler.commit(scheduler.plan())
        runner.copy(work)
        outcome = run_isolated(runner, work)
        assert not outcome.failed
        for event in scheduler.update(work, outcome.results):
            assert not isinstance(event, Finished), event
            key = event.sequence.request.id, event.sequence.choice
            out.setdefault(key, []).append((event.token, event.logprobs))
    assert made > 12 or not fail
    return out


def some_of(asked: str) -> list[Request]:
    """Requests by the words of a test's parameter."""
    if "penalized" in asked:
        return requests(*PENALIZED)
    some = requests(*PARAMS, *(MASKED if "with masks" in asked else ()))
    if asked == "without log-probabilities":
        return [request for request in some if request.params.logprobs is None]
    return some[:PLAIN] if asked == "plain" else some


@functools.cache
def general_texts(asked: str) -> dict[tuple[str, int], Any]:
    """What those requests get in the general mode, once for all tests."""
    return texts(rig("llama", "flashinfer"), some_of(asked))


@pytest.mark.parametrize(
    ("kernels", "setting", "asked"),
    [
        ("resident", SETTING, "all"),
        ("graphs", SETTING, "all"),
        ("graphs", replace(SETTING, graphs=2), "all"),
        ("graphs", replace(SETTING, graphs=0), "all"),
        ("graphs", replace(SETTING, interval=1), "all"),
        ("graphs", SETTING, "plain"),
        ("resident", SETTING, "all, and some with masks"),
        ("graphs", SETTING, "all, and some with masks"),
        ("resident", replace(SETTING, listed=25), "all, and some by the host"),
        ("resident", replace(SETTING, listed=25), "penalized, and some by the host"),
        # A list that is full, and one that becomes so.
        ("graphs", replace(SETTING, listed=25), "all, and some by the host"),
        ("triton resident", SETTING, "all"),
        ("triton graphs", SETTING, "all"),
        ("triton graphs", replace(SETTING, interval=1, graphs=2), "plain"),
    ],
)
def test_sampled_text_is_that_of_the_general_way(
    kernels: str, setting: Setting, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps that are sampled on the device throughout, and in those of which some are not."""
    some = some_of(asked)
    want = general_texts(asked.removesuffix(", and some by the host"))
    by_host, begin = 0, ModelRunner._begin

    def spy(*arguments: Any) -> Any:
        nonlocal by_host
        by_host += 1
        return begin(*arguments)

    monkeypatch.setattr(ModelRunner, "_begin", spy)
    got = texts(rig("llama", kernels), some, setting)
    assert (by_host > 4) == ("by the host" in asked)  # else only steps with prompts
    assert got.keys() == want.keys()
    for key, mine in got.items():
        assert [token for token, _ in mine] == [token for token, _ in want[key]]
        for (_, one), (_, other) in zip(mine, want[key], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=NEAR)
                assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=NEAR)
                assert (one.rank, one.top_ids) == (other.rank, other.top_ids)


@pytest.mark.parametrize("kernels", ["resident", "graphs", "triton graphs"])
def test_a_failed_step_leaves_nothing_wrong(kernels: str) -> None:
    asked = some_of("without log-probabilities")
    want = general_texts("without log-probabilities")
    setting = replace(SETTING, graphs=0)  # what is replayed calls no function that could fail
    assert texts(rig("llama", kernels), asked, setting, fail=True) == want


@pytest.mark.parametrize("kernels", ["resident", "graphs", "triton graphs"])
@pytest.mark.parametrize("chunk", [4096, 19])
def test_each_of_two_steps_in_flight_keeps_its_own_tokens(kernels: str, chunk: int) -> None:
    """Of decodes, or of decodes beside a part of a prompt."""
    asked, setting = requests(*PARAMS), replace(SETTING, chunk=chunk)
    want = general_texts("all")
    engine = rig("llama", kernels)
    scheduler = Scheduler(setting.limits(len(engine.groups)), engine.groups, b"rig")
    runner = engine.runner(setting)
    for request in asked:
        scheduler.add(request)
    beside = 0  # decodes in flight twice, beside a part of a prompt
    got: dict[tuple[str, int], list[int]] = {}
    flying: list[tuple[Work, Callable[[], Any]]] = []

    def update(work: Work, results: Any) -> None:
        for event in scheduler.update(work, results):
            assert isinstance(event, Token)
            got.setdefault((event.sequence.request.id, event.sequence.choice), []).append(
                event.token
            )

    while scheduler.has_work:
        plan = scheduler.plan_ahead() if flying else scheduler.plan()
        launches = plan is not None and runner.launches(plan.rows)
        if plan is not None and (launches or not flying):
            work = scheduler.commit(plan)
            runner.copy(work)
            if launches:
                mixed = any(row.count > 1 for row in work.rows)
                beside += mixed and any(row.sequence.sampled_in_flight for row in work.rows)
                flying.append((work, runner.launch(work)))
                scheduler.launch(work)
            else:
                update(work, runner.execute(work))
        if len(flying) == 2 or (flying and not launches):
            work, collect = flying.pop(0)
            update(work, collect())
        scheduler.check()
    assert got == {key: [token for token, _ in tokens] for key, tokens in want.items()}
    assert (beside > 5) == (chunk < 4096)


def test_only_what_the_device_samples_is_launched() -> None:
    runner = rig("llama", "resident").runner(SETTING)

    def row(start: int, count: int, **params: Any) -> Row:
        request = Request("r", (1, 2, 3, 4), SamplingParams(**params), 9)
        samples = start + count == 4
        return Row(Sequence(0, request, 0, [1, 2, 3, 4]), start, count, samples=samples)

    plain = row(3, 1)
    assert runner.launches([plain, row(3, 1, temperature=0.0)])
    assert not runner.launches([])
    for start in (0, 3):
        for more in (*PARAMS, *MASKED, {"min_tokens": 2}):
            assert runner.launches([plain, row(start, 4 - start, **more)])
    short = rig("llama", "resident").runner(replace(SETTING, listed=2))
    by_host = {"logit_bias": {5: 1.0, 6: 1.0, 7: 1.0}}
    for start in (0, 3):
        assert not short.launches([plain, row(start, 4 - start, **by_host)])
    assert short.launches([plain, row(0, 3, **by_host)])
    assert not runner.launches([row(0, 3, prompt_logprobs=1)])
    guided = row(3, 1)
    guided.sequence.guide = object()
    assert runner.launches([plain, guided])
    assert not rig("llama", "flashinfer").runner(SETTING).launches([plain])


def test_steps_are_replayed_once_their_size_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    record, replay = TapeRecorder.record, Tape.replay

    def spy_record(self: TapeRecorder, step: Callable[[], object]) -> Tape:
        seen.append("record")
        return record(self, step)

    def spy_replay(self: Tape) -> None:
        seen.append("replay")
        replay(self)

    monkeypatch.setattr(TapeRecorder, "record", spy_record)
    monkeypatch.setattr(Tape, "replay", spy_replay)
    asked = [greedy(str(i), tuple(range(5 + i, 20 + i)), 12 + 4 * i) for i in range(5)]
    outcome = rig("llama", "graphs").run(replace(SETTING, block_size=16), [(0, r) for r in asked])
    # Of 5 rows, then of 4 and 3 in one size, 2 and 1.
    assert seen.count("record") == 4
    assert seen.count("replay") == outcome.steps - 1 - 4


def test_graphs_are_captured_at_start_and_then_only_replayed() -> None:
    runner = rig("llama", "graphs").runner(FEW)
    steps = runner._decodes
    assert steps is not None
    assert steps._graphs is not None
    before = steps.table.state.clone()
    assert [*steps.capture(lambda: False)] == [(i, 13) for i in range(1, 14)]
    # What takes most memory is first, whose room the others share.
    assert [*steps._graphs._graphs][:2] == [(8, HEAVIEST), (8, GREEDY)]
    assert torch.equal(steps.table.state, before)
    recorder: Any = steps._graphs._recorder
    engine = rig("llama", "graphs")
    scheduler = Scheduler(SETTING.limits(len(engine.groups)), engine.groups, b"rig")
    for request in requests(*PARAMS[:PLAIN]):
        scheduler.add(request)
    while scheduler.has_work:
        work = scheduler.commit(scheduler.plan())
        scheduler.update(work, runner.execute(work))
    assert recorder.records == 13


def test_capturing_stops_when_its_time_is_over_and_at_the_limit() -> None:
    steps = rig("llama", "graphs").runner(FEW)._decodes
    assert steps is not None
    left = iter([False, True])
    assert [*steps.capture(lambda: next(left))] == [(1, 13), (2, 13)]
    few = rig("llama", "graphs").runner(replace(FEW, graphs=3))._decodes
    assert few is not None
    assert [*few.capture(lambda: False)] == [(1, 3), (2, 3), (3, 3)]
    assert few._graphs is not None
    assert [*few._graphs._graphs] == [(size, GREEDY) for size in (8, 4, 2)]


def test_where_cuts_are_found_otherwise_what_filters_is_captured_again() -> None:
    steps = rig("llama", "graphs").runner(FEW)._decodes
    assert steps is not None
    assert steps._graphs is not None
    modes = [SamplingMode(DrawKind.PLAIN), SamplingMode(DrawKind.FILTERED), HEAVIEST]
    for mode in (*modes, GENERAL):
        steps.capture_one(8, mode)
    cut: list[int] = []

    def note(scores: torch.Tensor, rows: RowParameters) -> torch.Tensor:
        cut.append(len(rows.top_k))
        return sample_rows.cut_of(scores, rows)

    steps.use_cuts(note)
    assert [*steps._graphs._graphs] == [(8, modes[0]), (8, GENERAL)]
    for mode in modes:
        steps.capture_one(8, mode)
    assert cut == [8, 8] * 2  # each when it runs and when it is recorded
    assert len(steps._graphs) == 4


def test_a_failing_capture_ends_capturing_and_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TapeRecorder, step: Callable[[], object]) -> Tape:
        raise RuntimeError("operation not permitted when stream is capturing")

    asked = requests(*PARAMS)
    want = texts(rig("llama", "resident"), asked)
    monkeypatch.setattr(TapeRecorder, "record", refuse)
    assert texts(rig("llama", "graphs"), asked).keys() == want.keys()


def test_blocks_whose_sending_failed_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = some_of("without log-probabilities")
    want = general_texts("without log-probabilities")
    send, calls = SequenceTable._send, 0

    def fail_once(self: SequenceTable, index: Any, changed: Any, growth: Growth, into: Any) -> None:
        nonlocal calls
        calls += bool(len(growth.spans))
        if len(growth.spans) and calls == 2:
            raise RuntimeError("planted")
        send(self, index, changed, growth, into)

    monkeypatch.setattr(SequenceTable, "_send", fail_once)
    assert texts(rig("llama", "resident"), asked) == want
    assert calls > 2


def test_decodes_alone_take_this_way_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    run = DecodeSteps.run

    def spy(self: DecodeSteps, rows: list[Row], *how: Callable[..., Any]) -> Any:
        seen.append(len(rows))
        return run(self, rows, *how)

    monkeypatch.setattr(DecodeSteps, "run", spy)
    asked = requests(*PARAMS[:3])
    texts(rig("llama", "resident"), asked)
    assert seen == [3] * 11 + [2, 1]
    texts(rig("llama", "flashinfer"), asked)
    assert len(seen) == 13


@pytest.mark.parametrize(
    ("row", "decode"),
    [((3, 1, True), True), ((2, 2, True), False), ((2, 1, False), False), ((0, 4, True), False)],
)
def test_what_is_a_decode(row: tuple[int, int, bool], *, decode: bool) -> None:
    sequence = Sequence(0, Request("r", (1, 2, 3, 4), SamplingParams(), 9), 0, [1, 2, 3, 4])
    assert is_decode(Row(sequence, *row)) is decode


def test_a_row_that_scores_its_prompt_is_none() -> None:
    params = SamplingParams(prompt_logprobs=1)
    sequence = Sequence(0, Request("r", (1, 2), params, 9), 0, [1, 2])
    assert not is_decode(Row(sequence, 1, 1, samples=True))


def test_one_row_that_is_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rig("llama", "resident")
    runner, forward = engine.runner(SETTING), DecodeSteps._forward

    def spoiled(self: DecodeSteps, index: torch.Tensor, plans: list[Any]) -> torch.Tensor:
        out = forward(self, index, plans)
        out[1] = torch.nan
        return out

    monkeypatch.setattr(DecodeSteps, "_forward", spoiled)
    scheduler = Scheduler(SETTING.limits(len(engine.groups)), engine.groups, b"rig")
    for request in requests(*PARAMS[:3]):
        scheduler.add(request)
    for _ in range(2):
        work = scheduler.commit(scheduler.plan())
        events = scheduler.update(work, runner.execute(work))
    failed = [event for event in events if isinstance(event, Finished)]
    assert [(e.sequence.id, e.failure) for e in failed] == [(1, NON_FINITE)]
    assert len(events) == 3


def test_bytes_are_those_of_the_tensors() -> None:
    steps = rig("gemma2", "resident").runner(SETTING)._decodes
    assert steps is not None
    sampler = steps.sampler
    kept = [*steps.table.tensors, sampler.index, sampler._tokens, sampler._values]
    kept += [sampler._numbers, sampler._hashes, steps._places]
    cache = steps._cache
    assert steps.nbytes == sum(x.nbytes for x in kept) + cache.nbytes // cache.units


def test_with_graphs_logits_for_the_host_have_one_place_which_no_graph_owns() -> None:
    """However many sizes are captured, and whichever graphs are dropped."""
    steps = rig("llama", "graphs").runner(replace(FEW, graphs=2))._decodes
    assert steps is not None
    assert steps._graphs is not None
    width = steps._model.logits_width
    assert steps.held_nbytes == 8 * width * 4
    places = set()
    for size in (8, 4, 1):
        for _ in range(2):  # one that runs and is recorded, and one that is replayed
            done = steps._compute((), size, GENERAL)
            assert done.logits is not None
            assert done.logits.shape == (size, width)
            assert done.logits.isfinite().all()
            places.add(done.logits.untyped_storage().data_ptr())
        steps._graphs.clear()
    assert len(places) == 1
    bare = rig("llama", "resident").runner(SETTING)._decodes
    assert bare is not None
    assert bare.held_nbytes == 0
