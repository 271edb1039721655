"""Where large texts rest beside the engine: on as many cores as the engine takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from fairlead_runtime.grammar.compile import TokenizerFacts
from fairlead_runtime.processes import http_process
from support import tiny


@pytest.mark.parametrize(
    ("cores", "busy", "rests"),
    [(1, True, True), (2, True, True), (2, False, False), (3, True, False)],
)
def test_large_texts_rest_beside_a_busy_engine_that_takes_all_cores(
    cores: int, busy: bool, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_process, "cpu_limit", lambda: cores)
    tokenizer = tiny.tokenizer()
    service: Any = SimpleNamespace(busy=busy)
    facts = TokenizerFacts.of(tokenizer, len(tokenizer), {0})
    encoder = http_process._prompt_encoder(tokenizer, facts, service)
    assert encoder._pacer._busy() is rests
    encoder.close()
