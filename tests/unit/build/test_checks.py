"""The device that a configuration chooses, with and without an accelerator on the host."""

from types import SimpleNamespace

import pytest
import torch

from fairlead_runtime.build import checks
from fairlead_runtime.build.checks import device_facts
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.settings.engine_config import ConfigError, Device


@pytest.fixture(params=[False, True], ids=["no accelerator", "accelerator"])
def available(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.version, "cuda", "13.2")  # also where this torch is a CPU build
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return bool(request.param)


@pytest.mark.parametrize(
    ("choice", "with_accelerator", "without"),
    [("auto", "cuda", "cpu"), ("cpu", "cpu", "cpu"), ("cuda", "cuda", None)],
)
def test_the_choice_decides_and_cuda_is_never_replaced_by_the_cpu(
    choice: Device, with_accelerator: str, without: str | None, available: bool
) -> None:
    expected = with_accelerator if available else without
    if expected is None:
        with pytest.raises(ModelError) as refused:
            device_facts(choice)
        assert refused.value.code == "NoAccelerator"
        assert "no accelerator" in refused.value.message
        assert "check the driver" in refused.value.hint
        return
    facts = device_facts(choice)
    assert facts.kind == expected
    assert facts.total_bytes > 0


@pytest.mark.usefixtures("available")
def test_a_cpu_build_finds_no_accelerator_and_says_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where CUDA's own library answers that there is one: a trimmed build ends at its use."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ModelError) as refused:
        device_facts("cuda")
    assert refused.value.code == "NoAccelerator"
    assert "is a CPU build" in refused.value.message
    assert "runtime.acceleratorImage" in refused.value.hint
    assert "driver" not in refused.value.hint
    assert device_facts("auto").kind == "cpu"


@pytest.mark.parametrize(
    ("version", "choice", "visible", "lines"),
    [
        (None, "auto", True, 1),
        (None, "auto", False, 0),
        (None, "cpu", True, 0),
        ("13.2", "auto", True, 0),
    ],
)
def test_a_cpu_build_that_leaves_a_device_unused_says_so(
    version: str | None,
    choice: Device,
    *,
    visible: bool,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks, "has_nvidia_device", lambda: visible)
    assert device_facts(choice).kind == "cpu"
    assert len(caplog.messages) == lines
    assert all("CPU build" in message for message in caplog.messages)


def test_each_rank_needs_an_accelerator_or_its_share_of_the_host(available: bool) -> None:
    one, two = device_facts("auto"), device_facts("auto", 2)
    assert two.total_bytes == one.total_bytes if available else one.total_bytes // 2
    if available:
        with pytest.raises(ConfigError, match="4 accelerators are asked for, torch finds 2"):
            device_facts("auto", 4)
