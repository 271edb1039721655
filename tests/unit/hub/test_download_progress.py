"""How the progress of a download is shown: a bar on a terminal, a few lines in a log."""

import io
import logging

import pytest

from fairlead_runtime.hub.download_progress import show_progress
from fairlead_runtime.hub.fetch import Progress

TOTAL = 3 * 2**30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_ten_percent_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with show_progress("hf://a/b", io.StringIO()) as report:
        for thousandth in range(1001):
            report(Progress(TOTAL * thousandth // 1000, TOTAL))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 11
    assert lines[0] == "fetching hf://a/b: 0 % of 3.00GB"
    assert lines[-1] == "fetching hf://a/b: 100 % of 3.00GB"


def test_a_download_of_nothing_is_complete(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with show_progress("hf://a/b", io.StringIO()) as report:
        report(Progress(0, 0))
    assert "100 %" in caplog.text


def test_a_terminal_gets_a_bar_and_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    out = Terminal()
    with show_progress("hf://a/b", out) as report:
        report(Progress(TOTAL // 2, TOTAL))
        report(Progress(TOTAL, TOTAL))
    assert "fetching hf://a/b" in out.getvalue()
    assert not caplog.records
