"""What a plan promises, an engine keeps: its number of blocks in a CPU pod of any size, and every
fix that a message names.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.harness.cel_cases import BASE, merge
from fairlead_operator.commands.plan import main as fairlead_plan
from fairlead_operator.decide.children.capacity import plan_of
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_runtime.build.resolve import ResolvedConfig
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.terms import GIB, PROCESS
from support import tiny
from support.kernel_sets import rows_beyond_the_plan
from support.started import pod_root, start_engine

DEMO = Path(__file__).parents[3] / "runtime/fairlead_runtime/demo"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("llama"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose longest sequence takes more memory than its weights."""
    model = tiny.build("llama", max_position_embeddings=32768)
    return tiny.save(model, tmp_path_factory.mktemp("long_model"))


class Pod:
    """One CPU pod: its resource, and the engine that starts in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._starts = 0

    def resource(self, memory: str, **spec: Any) -> InferenceDeployment:
        resources = {"accelerator": {"count": 0}, "memory": memory, "sharedMemory": "64Mi"}
        return InferenceDeployment.from_body(
            merge(BASE, {"spec": {"resources": resources, **spec}})
        )

    def start(
        self, model: Path, config: EngineConfig, memory: int, **process: int
    ) -> ResolvedConfig:
        self._starts += 1
        root = pod_root(self._folder / str(self._starts), memory)
        return start_engine(self._monkeypatch, root, model, config, **process)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    return Pod(tmp_path, monkeypatch)


def config_of(model: Path) -> Any:
    return json.loads((model / "config.json").read_text())


@pytest.mark.parametrize(
    ("memory", "tokens"),
    [
        pytest.param(memory, tokens, marks=[pytest.mark.full] * ((number + place) % 2))
        for number, memory in enumerate((2, 2.5, 3, 4, 5, 6, 8, 16, 32, 64))
        for place, tokens in enumerate((256, 8192))
    ],
)
def test_planned_and_measured_blocks_differ_by_at_most_2_percent(
    memory: float, tokens: int, pod: Pod
) -> None:
    idep = pod.resource(f"{int(memory * 1024)}Mi", scheduler={"maxBatchTokens": tokens})
    planned = plan_of(config_of(DEMO), idep)
    measured = pod.start(DEMO, idep.engine, int(memory * GIB))
    assert planned.fits
    drift = 100 * (measured.num_blocks - planned.num_blocks) / planned.num_blocks
    assert abs(drift) <= 2, f"{planned.num_blocks} planned, {measured.num_blocks} measured"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("gpt2", torch.float32), ("llama", torch.bfloat16)],
)
def test_int8_weights_are_planned_and_measured_alike(
    family: str, dtype: torch.dtype, tmp_path: Path, pod: Pod
) -> None:
    model = tiny.save(tiny.build(family).to(dtype), tmp_path / "int8")
    scheduler = {"maxBatchTokens": 256, "maxRequests": 16}
    plain, rounded = (
        pod.resource("2Gi", scheduler=scheduler, engine={"quantization": method})
        for method in ("none", "int8")
    )
    planned = plan_of(config_of(model), rounded)
    measured = pod.start(model, rounded.engine, 2 * GIB).plan
    weights = planned.terms["weights"]
    assert abs(measured.terms["weights"] - weights) <= 0.02 * weights
    assert weights < plan_of(config_of(model), plain).terms["weights"]
    drift = 100 * (measured.num_blocks - planned.num_blocks) / planned.num_blocks
    assert abs(drift) <= 2, f"{planned.num_blocks} planned, {measured.num_blocks} measured"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bfloat16_weights_are_planned_and_measured_alike(
    family: str, tmp_path: Path, pod: Pod, caplog: pytest.LogCaptureFixture
) -> None:
    # As wide as common models: a panel's padding and vectors in float32 count for little.
    width = {"n_embd": 256} if family == "gpt2" else {"hidden_size": 256, "intermediate_size": 768}
    built = tiny.build(family, **width).to(torch.bfloat16)
    model = tiny.save(built, tmp_path / "bfloat16")
    scheduler = {"maxBatchTokens": 256, "maxRequests": 16}
    own, wide = (
        pod.resource("2Gi", scheduler=scheduler, engine={"dtype": dtype})
        for dtype in ("auto", "float32")
    )
    planned = plan_of(config_of(model), own)
    with caplog.at_level("INFO"):
        measured = pod.start(model, own.engine, 2 * GIB).plan
    assert re.search(
        r"kernels: .*fused (\d)/\1 layers, bfloat16 weights, bfloat16 head", caplog.text
    )
    weights = planned.terms["weights"]
    assert abs(measured.terms["weights"] - weights) <= 0.02 * weights
    in_float32 = plan_of(config_of(model), wide)
    shape = ModelShape.from_config(config_of(model))
    # In float32, too, its kernels hold matrices as they are stored.
    rest = shape.parameters - shape.layer_matrices - shape.vocab * shape.hidden
    assert in_float32.terms["weights"] - weights == 2 * rest
    for term in ("activations", "logits"):
        assert planned.terms[term] >= measured.terms[term], term
    drift = 100 * (measured.num_blocks - planned.num_blocks) / planned.num_blocks
    assert abs(drift) <= 2, f"{planned.num_blocks} planned, {measured.num_blocks} measured"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "tied"), [("olmo2", True), ("mixtral", False)])
def test_packed_weights_of_layers_that_do_not_fuse_are_planned_and_measured_alike(
    family: str,
    tied: bool,
    dtype: torch.dtype,
    tmp_path: Path,
    pod: Pod,
    caplog: pytest.LogCaptureFixture,
) -> None:
    built = tiny.build(family, tie_word_embeddings=tied, vocab_size=1000).to(dtype)
    model = tiny.save(built, tmp_path / "unfused")
    idep = pod.resource("2Gi", scheduler={"maxBatchTokens": 256, "maxRequests": 16})
    planned = plan_of(config_of(model), idep)
    with caplog.at_level("INFO"):
        measured = pod.start(model, idep.engine, 2 * GIB).plan
    name = str(dtype).removeprefix("torch.")
    packed = rf"\d+ other matrices packed( in \d+ blocks)?, {name} head"
    assert re.search(rf"kernels: .*fused 0/3 layers \(.*\).*, {packed}", caplog.text)
    padding = rows_beyond_the_plan(1000) * built.config.hidden_size * dtype.itemsize
    weights = planned.terms["weights"] - padding
    assert abs(measured.terms["weights"] - weights) <= 0.001 * weights
    for term in ("activations", "logits"):
        assert planned.terms[term] >= measured.terms[term], term


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_fp8_cache_is_planned_and_measured_alike_and_holds_twice_as_much(
    family: str, tmp_path: Path, pod: Pod, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.save(tiny.build(family).to(torch.bfloat16), tmp_path / "fp8")
    scheduler = {"maxBatchTokens": 256, "maxRequests": 16}
    plain, small = (
        pod.resource("2Gi", scheduler=scheduler, cache={"dtype": dtype, "cpuOffloadSpace": 0.1})
        for dtype in ("auto", "fp8")
    )
    planned, wide = plan_of(config_of(model), small), plan_of(config_of(model), plain)
    assert 2 * planned.block_bytes == wide.block_bytes
    assert planned.offload_units // 2 == wide.offload_units
    with caplog.at_level("INFO"):
        measured = pod.start(model, small.engine, 2 * GIB).plan
    assert measured.block_bytes == planned.block_bytes
    assert measured.kv_bytes_per_token == planned.kv_bytes_per_token
    drift = 100 * (measured.num_blocks - planned.num_blocks) / planned.num_blocks
    assert abs(drift) <= 2, f"{planned.num_blocks} planned, {measured.num_blocks} measured"
    for term in ("activations", "attention", "logits"):
        assert planned.terms[term] >= measured.terms[term], term
    assert "keys and values in fp8 move logits by 0." in caplog.text
    assert "no C++ kernels: their cache is in float32 or bfloat16, not in fp8" in caplog.text


def test_int8_weights_need_room_to_be_loaded_first(pod: Pod, tmp_path: Path) -> None:
    """A pod that has room for the rounded weights and a cache, but not for the original ones."""
    model = tiny.save(
        tiny.build("llama", hidden_size=1024, intermediate_size=4096), tmp_path / "wide"
    )
    scheduler = {"maxBatchTokens": 64, "maxRequests": 4, "maxQueue": 1}
    cache = {"maxMemoryPercent": 1, "numBlocks": 64}
    spec = {"scheduler": scheduler, "cache": cache, "engine": {"quantization": "int8"}}
    idep = pod.resource("8Gi", **spec)
    plan = plan_of(config_of(model), idep)
    assert plan.used < plan.loading, "a model for which loading decides"
    size = plan.loading - 1
    short = plan_of(config_of(model), pod.resource(str(size), **spec))
    assert not short.fits
    assert "GiB to load the weights, has" in short.message
    with pytest.raises(ConfigError, match=r"^quantization.*to load the weights") as refused:
        pod.start(model, idep.engine, size)
    assert "2 GiB of memory" in refused.value.hint
    assert pod.start(model, idep.engine, plan.loading).plan.fits


def test_int8_weights_are_refused_by_name_where_the_kernels_cannot_have_them(
    model: Path, tmp_path: Path, pod: Pod
) -> None:
    def refusal(model: Path, **settings: Any) -> str:
        config = EngineConfig(quantization="int8", max_batch_tokens=64, max_requests=4, **settings)
        with pytest.raises(ConfigError) as refused:
            pod.start(model, config, 2 * GIB)
        assert refused.value.field == "quantization"
        return str(refused.value)

    unfused = tiny.save(tiny.build("olmo2"), tmp_path / "olmo2")
    assert refusal(unfused) == (
        "quantization: int8 weights of layers that no kernel fuses are not supported (use none)"
    )
    assert "kernels is torch (use kernels auto)" in refusal(model, kernels="torch")
    assert "int8 is not supported in float16 on cpu" in refusal(model, dtype="float16")


def test_a_process_above_its_reservation_takes_blocks_and_warns(pod: Pod) -> None:
    idep = pod.resource("3Gi", scheduler={"maxBatchTokens": 256})
    planned = plan_of(config_of(DEMO), idep)
    measured = pod.start(DEMO, idep.engine, 3 * GIB, process=PROCESS + GIB // 2)
    lost = (planned.num_blocks - measured.num_blocks) * planned.block_bytes
    assert abs(lost - GIB // 2) <= GIB // 2 * 0.05
    assert "1.50 GiB before any weight" in measured.warnings[0]


FIXES = {
    "maxModelLen": ("engine", "maxModelLen"),
    "numBlocks": ("cache", "numBlocks"),
    "cpuOffloadSpace": ("cache", "cpuOffloadSpace"),
    "maxMemoryPercent": ("cache", "maxMemoryPercent"),
    "maxQueue": ("scheduler", "maxQueue"),
}
# Resources that do not fit, and the kinds of fix that their messages name.
WITHOUT_ROOM: tuple[tuple[str, dict[str, Any], set[str]], ...] = (
    ("1300Mi", {"cache": {"numBlocks": 1_000_000}}, {"numBlocks"}),
    ("1241Mi", {}, {"maxModelLen", "maxMemoryPercent"}),
    ("4Gi", {"cache": {"numBlocks": 4}}, {"maxModelLen", "numBlocks"}),
    ("4Gi", {"cache": {"cpuOffloadSpace": 2.6}}, {"cpuOffloadSpace", "maxMemoryPercent"}),
    ("4Gi", {"scheduler": {"maxQueue": 1_000_000}}, {"maxQueue"}),
    ("1000Mi", {"cache": {"maxMemoryPercent": 1}}, {"memory"}),
)


@pytest.mark.parametrize(("memory", "spec", "kinds"), WITHOUT_ROOM)
def test_every_fix_of_a_verdict_starts_an_engine(
    memory: str, spec: dict[str, Any], kinds: set[str], model: Path, pod: Pod
) -> None:
    spec = merge({"scheduler": {"maxBatchTokens": 256, "maxRequests": 16}}, spec)
    plan = plan_of(config_of(model), pod.resource(memory, **spec))
    assert not plan.fits
    _, _, advice = plan.message.partition(": set ")
    named = set()
    for way in advice.split(" or "):
        changed, size = spec, memory
        for fix in way.split(" and "):
            name, value = fix.replace("≤ ", "").split(" ")
            named.add(name)
            if name == "memory":
                size = value
            else:
                section, field = FIXES[name]
                changed = merge(changed, {section: {field: json.loads(value)}})
        fixed = pod.resource(size, **changed)
        resolved = pod.start(model, fixed.engine, fixed.spec.resources.memory.value)
        assert resolved.plan.fits, way
    assert named == kinds, plan.message


# GiB of a pod, the model, settings that do not fit, and the kinds of fix that the refusal names.
HINTS: tuple[tuple[float, str, dict[str, Any], set[str]], ...] = (
    (2, "model", {"num_blocks": 10_000_000}, {"num_blocks"}),
    (4, "model", {"cpu_offload_space": 2.7}, {"cpu_offload_space", "max_memory_percent"}),
    (4, "model", {"max_queue": 1_000_000}, {"max_queue"}),
    (1.2, "model", {"max_batch_tokens": 327680}, {"max_memory_percent", "max_batch_tokens"}),
    (1.09, "long_model", {"max_memory_percent": 1.0}, {"max_batch_tokens", "max_model_len"}),
    (1.5, "model", {"shared_memory": 2.0}, {"memory"}),
)


@pytest.mark.parametrize(("memory", "model_fixture", "settings", "kinds"), HINTS)
def test_every_fix_of_a_refused_start_starts_an_engine(
    memory: float,
    model_fixture: str,
    settings: dict[str, Any],
    kinds: set[str],
    request: pytest.FixtureRequest,
    pod: Pod,
) -> None:
    model: Path = request.getfixturevalue(model_fixture)
    settings = {"max_batch_tokens": 256, "max_requests": 16, **settings}
    with pytest.raises(ConfigError) as refused:
        pod.start(model, EngineConfig(**settings), int(memory * GIB))
    hint = refused.value.hint
    if needed := re.fullmatch(r"needs (\d+) GiB of memory", hint):
        pod.start(model, EngineConfig(**settings), int(needed[1]) * GIB)
        assert kinds == {"memory"}
        return
    advice = [(flag.replace("-", "_"), value) for flag, value in re.findall(r"--(\S+) (\S+)", hint)]
    assert {name for name, _ in advice} == kinds, hint
    for name, value in advice:
        pod.start(model, EngineConfig(**settings | {name: json.loads(value)}), int(memory * GIB))


def test_the_fix_of_a_length_beyond_the_models_own_starts_an_engine(model: Path, pod: Pod) -> None:
    settings: dict[str, Any] = {"max_batch_tokens": 256, "max_requests": 16}
    with pytest.raises(ConfigError) as refused:
        pod.start(model, EngineConfig(**settings, max_model_len=1025), 2 * GIB)
    most = re.fullmatch(r"set at most (\d+)", refused.value.hint)
    assert most, refused.value.hint
    for length in (int(most[1]), None):
        started = pod.start(model, EngineConfig(**settings, max_model_len=length), 2 * GIB)
        assert started.max_model_len == tiny.CONTEXT


def test_the_fix_of_a_host_without_room_beside_an_accelerator_fits_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def message_of(memory: str) -> str:
        resources = {"accelerator": {"memory": "80Gi"}, "memory": memory, "sharedMemory": "4Gi"}
        spec = {"resources": resources, "cache": {"cpuOffloadSpace": 2.5}}
        (tmp_path / "cr.yaml").write_text(json.dumps(merge(BASE, {"spec": spec})))
        code = fairlead_plan(["-f", str(tmp_path / "cr.yaml"), "-o", "json"])
        message = str(json.loads(capsys.readouterr().out)["message"])
        assert code == ("but the host" in message)
        return message

    needed = re.search(
        r"; but the host .*: set resources\.memory to at least (\d+)Gi$", message_of("2Gi")
    )
    assert needed
    assert "host" not in message_of(f"{needed[1]}Gi")
    assert "host" in message_of(f"{int(needed[1]) - 1}Gi"), "the fix is the least that fits"
