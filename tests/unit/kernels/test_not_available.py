"""What becomes of kernels that fail where something slower can serve."""

import logging

import pytest

from fairlead_kernels.interface.not_available import (
    NO_FALLBACK,
    FaultError,
    NotAvailableError,
    fall_back,
    importing,
)

LACKS = NotAvailableError("flashinfer computes in float16, the model in float32")
FAULTS = (FaultError("triton's layer differs"), RuntimeError("a capture failed"))


@pytest.mark.parametrize("strict", [False, True])
def test_kernels_that_lack_something_are_left_out_without_a_word(
    strict: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if strict:
        monkeypatch.setenv(NO_FALLBACK, "1")
    assert fall_back(LACKS) == str(LACKS)
    assert caplog.records == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_fault_is_logged_whole_and_is_raised_where_none_may_hide(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert fall_back(fault) == str(fault)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is fault
    monkeypatch.setenv(NO_FALLBACK, "1")
    with pytest.raises(type(fault)) as raised:
        fall_back(fault)
    assert raised.value is fault


def test_a_package_that_is_absent_is_no_fault_and_one_that_breaks_is() -> None:
    missing = ModuleNotFoundError("No module named 'some_package'", name="some_package")
    with (
        pytest.raises(NotAvailableError, match="is not installed") as absent,
        importing("some-package", "some_package"),
    ):
        raise missing
    assert not isinstance(absent.value, FaultError)
    with (
        pytest.raises(FaultError, match="cannot be imported: RuntimeError: no driver"),
        importing("some-package", "some_package"),
    ):
        raise RuntimeError("no driver")
