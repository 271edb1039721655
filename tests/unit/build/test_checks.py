"""The device that a configuration chooses, with and without an accelerator on the host."""

from types import SimpleNamespace

import pytest
import torch

from fairlead_runtime.build.checks import device_facts
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.settings.engine_config import ConfigError, Device


@pytest.fixture(params=[False, True], ids=["no accelerator", "accelerator"])
def available(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
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
        assert "--device cpu" in refused.value.hint
        return
    facts = device_facts(choice)
    assert facts.kind == expected
    assert facts.total_bytes > 0


def test_each_rank_needs_an_accelerator_or_its_share_of_the_host(available: bool) -> None:
    one, two = device_facts("auto"), device_facts("auto", 2)
    assert two.total_bytes == one.total_bytes if available else one.total_bytes // 2
    if available:
        with pytest.raises(ConfigError, match="4 accelerators are asked for, torch finds 2"):
            device_facts("auto", 4)
