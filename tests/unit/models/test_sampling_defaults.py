"""A model's own sampling values: which of generation_config.json count, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.models.sampling_defaults import sampling_defaults
from fairlead_runtime.processes.http_process import _rules
from fairlead_runtime.settings.engine_config import EngineConfig

QWEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
OTHERS = {"do_sample": False, "max_new_tokens": 7, "eos_token_id": [1], "min_p": None}


def folder(path: Path, **settings: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({}, {}),
        (OTHERS, {}),
        (QWEN | OTHERS, QWEN),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, {"min_p": 0.1, "repetition_penalty": 1.05}),
        ({"top_k": -1, "temperature": 0}, {"top_k": 0, "temperature": 0}),
    ],
)
def test_the_sampling_values_of_the_file_count_and_nothing_else_in_it(
    settings: dict[str, Any], values: dict[str, Any], tmp_path: Path
) -> None:
    assert sampling_defaults(folder(tmp_path, **settings)) == values


def test_a_model_without_the_file_has_none(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize("wrong", [{"top_p": 1.5}, {"temperature": "hot"}, {"top_k": 1.5}])
def test_a_value_that_no_request_may_have_is_refused_by_name(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"generation_config.json: {next(iter(wrong))}") as refused:
        sampling_defaults(folder(tmp_path, **wrong))
    assert "--generation-config none" in refused.value.hint


def test_the_server_says_what_it_takes_and_takes_nothing_where_it_must_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fairlead.serve")
    assert _rules(EngineConfig(), folder(tmp_path, **QWEN)).sampling == QWEN
    assert "temperature 0.6, top_k 20, top_p 0.95" in caplog.text
    assert _rules(EngineConfig(generation_config="none"), tmp_path).sampling == {}


@pytest.mark.parametrize("generation_config", ["auto", "none"])
@pytest.mark.parametrize("trusted", [True, False])
def test_a_template_of_a_request_runs_only_where_the_server_trusts_it(
    generation_config: Any, trusted: bool, tmp_path: Path
) -> None:
    config = EngineConfig(generation_config=generation_config, trust_request_chat_template=trusted)
    assert _rules(config, tmp_path).templates is trusted
