"""Which way decodes run, why no graph is captured, and what start measures and shows."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fairlead_kernels.packages import flashinfer_attention
from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.sampling.sampling_mode import GREEDY, HEAVIEST
from fairlead_runtime.device.step.decode_steps import DecodeSteps
from fairlead_runtime.device.step.graph_cache import GraphCache
from fairlead_runtime.device.warmup import decode_plan
from fairlead_runtime.device.warmup.decode_plan import DecodePlan
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.terms import state_versions
from support import flashinfer_standin, triton_standin
from support.engine_rig import rig
from support.graph_standin import Tape, TapeRecorder

CONFIG = EngineConfig(max_requests=6, max_batch_tokens=64, block_size=4, q_padding_interval=4)
LONGEST = 64
ON_GPU = cast("PagedModel", SimpleNamespace(device=torch.device("cuda"), states={}))


def flashinfer(family: str = "llama") -> Any:
    model = rig(family).model
    return flashinfer_standin.attention(model.heads, model.kinds)


def triton(family: str = "llama") -> Any:
    return triton_standin.attention(rig(family).model.heads)


def plain() -> TorchAttention:
    model = rig("llama").model
    return TorchAttention(model.heads, model.device)


REASONS = [
    ({}, flashinfer, False, "", True),
    ({}, triton, False, "", True),
    ({"cuda_graphs": "off"}, flashinfer, False, "--cuda-graphs is off", True),
    ({"max_cached_graphs": 0}, flashinfer, False, "--max-cached-graphs is 0", True),
    ({}, plain, False, "attention runs on torch, whose work depends on the lengths", False),
    ({}, flashinfer, True, "the ranks of a split model get each step from their first", False),
]


@pytest.mark.parametrize(("settings", "attention", "sharded", "reason", "resident"), REASONS)
def test_auto_says_why_no_graph_is_captured_on_a_gpu(
    settings: dict[str, Any], attention: Any, *, sharded: bool, reason: str, resident: bool
) -> None:
    choice = DecodePlan.choose(EngineConfig(**settings), ON_GPU, attention(), sharded=sharded)
    assert (choice.graphs_off_because, choice.attention is not None) == (reason, resident)
    if reason and not settings.get("cuda_graphs"):
        with pytest.raises(ConfigError) as error:
            DecodePlan.choose(
                EngineConfig(**settings, cuda_graphs="on"), ON_GPU, attention(), sharded=sharded
            )
        assert error.value.field == "cuda_graphs"
        assert reason in str(error.value)


def test_a_model_with_states_launches_each_step_as_it_is_and_captures_none() -> None:
    device = torch.device("cuda")
    model = cast("PagedModel", SimpleNamespace(device=device, states={0: ()}))
    for switch in ("auto", "on"):
        config = EngineConfig(async_batching=switch)
        choice = DecodePlan.choose(config, model, plain(), sharded=False)
        assert (choice.graphs_off_because, choice.sync_because) == ("its layers keep states", "")
        assert choice.state_on_device
        assert choice.attention is None
        assert state_versions(config, "cuda") == 3
    with pytest.raises(ConfigError, match="its layers keep states"):
        DecodePlan.choose(EngineConfig(cuda_graphs="on"), model, plain(), sharded=False)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"async_batching": "off"}, "--async-batching is off"),
        ({"deterministic": True}, "results are deterministic"),
    ],
)
def test_states_have_a_third_version_only_where_their_steps_are_launched(
    settings: dict[str, Any], reason: str
) -> None:
    model = cast("PagedModel", SimpleNamespace(device=torch.device("cuda"), states={0: ()}))
    config = EngineConfig(**settings)
    choice = DecodePlan.choose(config, model, plain(), sharded=False)
    assert choice.sync_because == reason
    assert not choice.state_on_device
    assert state_versions(config, "cuda") == state_versions(EngineConfig(), "cpu") == 2


@pytest.mark.parametrize(("_settings", "attention", "sharded", "_reason", "resident"), REASONS)
def test_steps_are_launched_ahead_wherever_the_device_keeps_what_sampling_needs(
    _settings: Any, attention: Any, _reason: Any, *, sharded: bool, resident: bool
) -> None:
    """On the first of several ranks, too, which captures no graph."""
    resident |= sharded
    auto = DecodePlan.choose(EngineConfig(), ON_GPU, attention(), sharded=sharded)
    assert (auto.sync_because == "") is auto.state_on_device is resident
    off = DecodePlan.choose(
        EngineConfig(async_batching="off"), ON_GPU, attention(), sharded=sharded
    )
    assert off.sync_because == "--async-batching is off"
    assert off.state_on_device is (resident and not sharded)
    on = EngineConfig(async_batching="on")
    if resident:
        assert DecodePlan.choose(on, ON_GPU, attention(), sharded=sharded).sync_because == ""
        return
    with pytest.raises(ConfigError) as error:
        DecodePlan.choose(on, ON_GPU, attention(), sharded=sharded)
    assert error.value.field == "async_batching"
    assert auto.sync_because in str(error.value)


def test_on_a_cpu_steps_wait_for_each_other_and_on_is_refused() -> None:
    model = rig("llama").model
    assert (
        DecodePlan.choose(CONFIG, model, flashinfer(), sharded=False).sync_because
        == "the model runs on cpu"
    )
    with pytest.raises(ConfigError, match="--async-batching: the model runs on cpu"):
        DecodePlan.choose(EngineConfig(async_batching="on"), model, flashinfer(), sharded=False)


def test_on_a_cpu_decodes_run_as_all_steps() -> None:
    model = rig("llama").model
    choice = DecodePlan.choose(CONFIG, model, flashinfer(), sharded=False)
    assert (choice.graphs_off_because, choice.attention) == ("the model runs on cpu", None)
    assert (choice.measure(LONGEST), choice.steps(cache_of(model), LONGEST)) == (0, None)
    assert choice.capture(None) is None


def cache_of(model: PagedModel, units: int = 40) -> CacheStorage:
    return CacheStorage(
        rig("llama").groups, model.heads, units=units, block_size=4, device=model.device
    )


def pretended(config: EngineConfig = CONFIG, attention: Any = flashinfer) -> DecodePlan:
    """As on a GPU, with the stand-in of graphs."""
    model = rig("llama").model
    return DecodePlan(config, model, attention(), "", new_recorder=lambda _: TapeRecorder())


@pytest.mark.parametrize("attention", [flashinfer, triton])
def test_graphs_are_measured_before_the_cache_and_captured_within_that(attention: Any) -> None:
    choice = pretended(attention=attention)
    measured = choice.measure(LONGEST)
    steps = choice.steps(cache_of(choice.model), LONGEST)
    taken = choice.capture(steps)
    assert taken is not None
    assert choice.graphs is not None
    assert len(choice.graphs) == 1 + 3 * 4  # 1, 2, 4 and 8 rows, in three ways
    # The stand-in shares no memory between graphs, as a GPU's pool does.
    assert 0 < taken < 13 * measured
    assert choice.attention is not None
    assert choice.attention.fixed_nbytes < measured


@pytest.mark.parametrize("most", [32, 2, 1])
def test_the_measure_is_one_graph_of_most_and_as_many_of_least_as_are_kept(most: int) -> None:
    choice = pretended(replace(CONFIG, max_cached_graphs=most))
    attention, recorder = flashinfer(), TapeRecorder()
    steps = DecodeSteps(
        choice.model,
        cache_of(choice.model, units=1),
        attention,
        sequences=6,
        max_model_len=LONGEST,
        graphs=GraphCache(recorder, 2),
        sizes=(1, 2, 4, 8),
    )
    taken, plans = [0], [0]
    for size, way in ((8, HEAVIEST), (1, GREEDY)):
        steps.capture_one(size, way)
        taken.append(recorder.nbytes - sum(taken))
        plans.append(attention.fixed_nbytes - sum(plans))
    _, large, small = taken
    assert 0 < small < large
    logits = 8 * choice.model.logits_width * 4  # of all sizes at one place
    graphs = large + (most - 1) * small + logits
    assert choice.measure(LONGEST) == graphs + plans[1] + 3 * plans[2]


def test_what_all_graphs_share_counts_as_taken() -> None:
    choice = pretended()
    taken = choice.capture(choice.steps(cache_of(choice.model), LONGEST))
    assert choice.graphs is not None
    assert choice.attention is not None
    logits = 8 * choice.model.logits_width * 4
    assert taken == choice.graphs.nbytes + choice.attention.fixed_nbytes + logits


def test_the_plans_of_tritons_attention_take_what_was_measured() -> None:
    """To the byte: sizes of 1, 2, 4 and 8 rows, and splits of 8 where 6 were reserved."""
    choice = pretended(attention=triton)
    assert choice.attention is not None
    choice.attention.reserve(choice.config.max_rows)
    h, groups = choice.model.heads, len(rig("llama").groups)
    choice.measure(LONGEST)
    choice.capture(choice.steps(cache_of(choice.model), LONGEST))
    splits = 2 * h.query * 4 * (h.value_dim + 2) * 4
    assert choice.attention.fixed_nbytes == splits + groups * 4 * 8 * 16


def test_capturing_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    choice = pretended()
    choice.capture(choice.steps(cache_of(choice.model), LONGEST))
    shown = capsys.readouterr().err
    assert "CUDA graphs" in shown
    assert "1/13 " in shown
    assert "13/13 " in shown


def test_capturing_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "CAPTURE_SECONDS", -1.0)
    choice = pretended()
    choice.capture(choice.steps(cache_of(choice.model), LONGEST))
    assert choice.graphs is not None
    assert len(choice.graphs) == 1


@pytest.mark.parametrize("switch", ["auto", "on"])
def test_a_step_that_cannot_be_captured_turns_auto_off_and_refuses_on(
    monkeypatch: pytest.MonkeyPatch, switch: Any
) -> None:
    def refuse(_recorder: TapeRecorder, _step: object) -> Tape:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(TapeRecorder, "record", refuse)
    choice = pretended(EngineConfig(**{**vars_of(CONFIG), "cuda_graphs": switch}))
    if switch == "on":
        with pytest.raises(ConfigError, match="cannot be captured: RuntimeError: operation not"):
            choice.measure(LONGEST)
    else:
        assert choice.attention is not None
        assert choice.measure(LONGEST) == choice.attention.fixed_nbytes > 0
        assert choice.graphs_off_because.startswith("a step cannot be captured: RuntimeError")
        assert choice.steps(cache_of(choice.model), LONGEST) is not None
        assert choice.graphs is None


def stale(tape: Tape, replay: Any, step: Any) -> None:
    """What the newest step has made is there, and nothing new."""


def shifted(tape: Tape, replay: Any, step: Any) -> None:
    """The rows' places are those of the capture: padding."""
    index = step.sampler.index
    kept = index.clone()
    index.zero_()
    replay(tape)
    index.copy_(kept)


def one_wrong(tape: Tape, replay: Any, step: Any) -> None:
    replay(tape)
    step.sampler._values[2] += 1


@pytest.mark.parametrize("attention", [flashinfer, triton])
@pytest.mark.parametrize("fault", [None, stale, shifted, one_wrong])
@pytest.mark.parametrize("switch", ["auto", "on"])
def test_a_captured_step_that_computes_something_else_turns_auto_off_and_refuses_on(
    monkeypatch: pytest.MonkeyPatch, switch: Any, fault: Any, attention: Any
) -> None:
    replay, made = Tape.replay, list[DecodeSteps]()
    init = DecodeSteps.__init__

    def noted(self: DecodeSteps, *arguments: Any, **options: Any) -> None:
        made.append(self)
        init(self, *arguments, **options)

    monkeypatch.setattr(DecodeSteps, "__init__", noted)
    if fault is not None:
        monkeypatch.setattr(Tape, "replay", lambda tape: fault(tape, replay, made[-1]))
    config = EngineConfig(**{**vars_of(CONFIG), "cuda_graphs": switch})
    choice = pretended(config, attention)
    assert choice.attention is not None
    if fault is None:
        assert choice.measure(LONGEST) > choice.attention.fixed_nbytes
        assert not choice.graphs_off_because
    elif switch == "on":
        with pytest.raises(ConfigError, match="a captured step gives other logits than without"):
            choice.measure(LONGEST)
    else:
        assert choice.measure(LONGEST) == choice.attention.fixed_nbytes
        assert choice.graphs_off_because.startswith(
            "a captured step gives other logits than without, by "
        )


@pytest.mark.parametrize("switch", ["auto", "on"])
def test_a_step_that_cannot_be_planned_for_graphs_turns_auto_off_and_refuses_on(
    monkeypatch: pytest.MonkeyPatch, switch: Any
) -> None:
    """flashinfer reserves more for plans at fixed addresses than for others."""
    monkeypatch.setattr(flashinfer_attention, "split_bytes", lambda *_, **__: 0)
    choice = pretended(EngineConfig(**{**vars_of(CONFIG), "cuda_graphs": switch}))
    if switch == "on":
        with pytest.raises(ConfigError, match="cannot be captured: RuntimeError: Buffer overflow"):
            choice.measure(LONGEST)
    else:
        choice.measure(LONGEST)
        assert choice.graphs_off_because.startswith(
            "a step cannot be captured: RuntimeError: Buffer overflow"
        )
        steps = choice.steps(cache_of(choice.model), LONGEST)
        assert choice.capture(steps) is None


@pytest.mark.parametrize("switch", ["auto", "on"])
def test_a_step_that_fails_when_all_are_captured_turns_auto_off_and_refuses_on(
    monkeypatch: pytest.MonkeyPatch, switch: Any
) -> None:
    """The cache is there by then, and memory short: some graphs are captured, and none is kept."""
    choice = pretended(EngineConfig(**{**vars_of(CONFIG), "cuda_graphs": switch}))
    choice.measure(LONGEST)
    steps = choice.steps(cache_of(choice.model), LONGEST)
    assert steps is not None
    plan, calls = DecodeSteps._plan, 0

    def fail(self: DecodeSteps, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("CUDA out of memory")
        return plan(self, *arguments)

    monkeypatch.setattr(DecodeSteps, "_plan", fail)
    if switch == "on":
        with pytest.raises(ConfigError, match="cannot be captured: RuntimeError: CUDA out of mem"):
            choice.capture(steps)
        return
    assert choice.capture(steps) is None
    assert (
        choice.graphs_off_because == "a step cannot be captured: RuntimeError: CUDA out of memory"
    )
    assert choice.graphs is not None
    assert len(choice.graphs) == 0
    assert steps._size(3) == 3, "steps that are not captured are not padded"
    assert steps.held_nbytes == 0
    steps._compute((), 3)


def vars_of(config: EngineConfig) -> dict[str, Any]:
    return {
        name: getattr(config, name)
        for name in ("max_requests", "max_batch_tokens", "block_size", "q_padding_interval")
    }
