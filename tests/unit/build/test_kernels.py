"""Which kernels a start takes, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from fairlead_kernels.choice.backend import pick
from fairlead_kernels.cpu import cpu_operations, first_start
from fairlead_kernels.interface.attention import Heads, LayerKind
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_kernels.packages import flashinfer_package
from fairlead_runtime.build import checks
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.terms import GIB, DeviceFacts

DEMO = Path(checks.__file__).parents[1] / "demo"
HEADS = Heads(4, 2, 8, 8, torch.float32)
KINDS = (frozenset({LayerKind(0.3)}),)
CPU, GPU = DeviceFacts("cpu", 8 * GIB), DeviceFacts("cuda", 80 * GIB)


@pytest.fixture
def _not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_instruction_set: str | None = None) -> cpu_operations.CpuOperations:
        raise NotAvailableError("they are not built")

    monkeypatch.setattr(cpu_operations, "load", load)


@pytest.mark.usefixtures("_not_built")
def test_cpu_is_refused_before_the_model_loads_where_the_kernels_are_not_built() -> None:
    with pytest.raises(ConfigError, match="--kernels: cpu: they are not built") as error:
        checks.check(DEMO, EngineConfig(kernels="cpu"), CPU)
    assert (error.value.field, error.value.hint) == ("kernels", "use auto or torch")


@pytest.mark.usefixtures("_not_built")
def test_int8_weights_are_refused_before_the_model_loads_where_the_kernels_are_not_built() -> None:
    config = EngineConfig(quantization="int8")
    with pytest.raises(ConfigError, match=r"int8 needs the C\+\+ kernels: they are not") as error:
        checks.check(DEMO, config, CPU)
    assert (error.value.field, error.value.hint) == ("quantization", "use none")


def test_why_no_kernels_of_gpus_serve_a_model_keeps_none_of_cpus_from_it() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert str(pick(HEADS, KINDS, cpu, torch_because="of its keys")) == str(pick(HEADS, KINDS, cpu))
    choice = pick(HEADS, KINDS, gpu, torch_because="of its keys")
    assert (choice.operations, choice.attention.name) == (None, "torch")
    assert choice.reason.endswith("; of its keys")
    for settings in ({"kernels": "flashinfer"}, {"kernels": "cpu"}, {"deterministic": True}):
        with pytest.raises(NotAvailableError, match="of its keys"):
            pick(HEADS, KINDS, gpu, torch_because="of its keys", **settings)


@pytest.mark.usefixtures("_not_built")
def test_auto_takes_plain_torch_and_says_why() -> None:
    choice = pick(HEADS, KINDS, torch.device("cpu"))
    assert choice.operations is None
    assert str(choice).startswith("torch (plain torch on ")
    assert str(choice).endswith("; no C++ kernels: they are not built)")


@pytest.mark.parametrize(
    ("config", "device", "reason"),
    [
        (EngineConfig(kernels="cpu", dtype="float16"), CPU, "or bfloat16, the model in float16"),
        (EngineConfig(kernels="cpu"), DeviceFacts("cuda", 80 * GIB), "the model runs on cuda"),
    ],
)
def test_cpu_is_refused_for_a_model_that_these_kernels_cannot_serve(
    config: EngineConfig, device: DeviceFacts, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        checks.check(DEMO, config, device)
    assert error.value.field == "kernels"


def test_with_an_fp8_cache_a_cpu_takes_plain_torch_and_says_why() -> None:
    fp8, reason = EngineConfig(kernels="cpu", cache_dtype="fp8"), "not in fp8"
    with pytest.raises(ConfigError, match=rf"--kernels: cpu: .*{reason}") as error:
        checks.check(DEMO, fp8, CPU)
    assert (error.value.field, error.value.hint) == ("kernels", "use auto or torch")
    choice = pick(replace(HEADS, fp8_cache=True), KINDS, torch.device("cpu"))
    assert (choice.operations, choice.attention.name) == (None, "torch")
    assert str(choice).endswith(
        "; no C++ kernels: their cache is in float32 or bfloat16, not in fp8)"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_serves_models_in_float32_and_bfloat16(dtype: torch.dtype) -> None:
    try:
        kernels = cpu_operations.load()
    except NotAvailableError as error:
        pytest.skip(str(error))
    name = str(dtype).removeprefix("torch.")
    checks.check(DEMO, EngineConfig(kernels="cpu", dtype=name), CPU)  # type: ignore[arg-type]
    choice = pick(replace(HEADS, dtype=dtype), KINDS, torch.device("cpu"), "cpu")
    assert (choice.attention.name, choice.operations is not None) == (kernels.name, True)


@pytest.mark.parametrize(
    ("config", "device", "reason"),
    [
        (EngineConfig(kernels="flashinfer"), CPU, "flashinfer is not supported in float32 on cpu"),
        (EngineConfig(kernels="flashinfer", device="cpu"), CPU, "not supported on cpu yet"),
        (EngineConfig(kernels="flashinfer"), GPU, "not supported in float32 on cuda yet"),
        (EngineConfig(kernels="flashinfer", dtype="float32"), GPU, "not supported in float32 yet"),
        (EngineConfig(kernels="flashinfer", dtype="float16"), GPU, "flashinfer: it cannot be had"),
    ],
)
def test_flashinfer_is_refused_before_the_model_loads_where_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, device: DeviceFacts, reason: str
) -> None:
    def missing() -> NoReturn:
        raise NotAvailableError("it cannot be had")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(flashinfer_package, "load", missing)
    with pytest.raises(ConfigError, match=reason) as error:
        checks.check(DEMO, config, device)
    assert error.value.field == "kernels"
    monkeypatch.setattr(flashinfer_package, "load", lambda: None)
    checks.check(DEMO, replace(config, dtype="float16", device="auto"), GPU)


def test_torch_is_taken_without_a_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_operations, "load")
    choice = pick(HEADS, KINDS, torch.device("cpu"), "torch")
    assert (choice.operations, choice.attention.name) == (None, "torch")


@pytest.mark.parametrize(
    ("config", "device", "compiles"),
    [
        (EngineConfig(), CPU, True),
        (EngineConfig(dtype="bfloat16"), CPU, True),
        (EngineConfig(kernels="torch"), CPU, False),
        (EngineConfig(dtype="float16"), CPU, False),
        (EngineConfig(cache_dtype="fp8"), CPU, False),
        (EngineConfig(), GPU, False),
    ],
)
def test_a_start_compiles_the_kernels_where_they_can_serve_the_model(
    config: EngineConfig, device: DeviceFacts, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, asked = list[str](), list[int]()

    def compile_missing(_installed: Path, begun: Callable[[], None], compilers: int) -> None:
        asked.append(compilers)
        begun()

    monkeypatch.setattr(first_start, "compile_missing", compile_missing)
    checks.check(DEMO, config, device, lambda part, *_: told.append(part))
    assert told == ([*["kernels"] * compiles, "weights"])
    assert len(asked) == compiles
    assert all(compilers >= 1 for compilers in asked)


def test_the_fastest_kernels_are_named_by_their_instruction_set() -> None:
    try:
        name = cpu_operations.load().name
    except NotAvailableError as error:
        pytest.skip(str(error))
    assert str(pick(HEADS, KINDS, torch.device("cpu"))) == name
