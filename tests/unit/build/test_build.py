"""What the composition root sets for the whole process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_runtime import LLM
from fairlead_runtime.build import build_engine
from fairlead_runtime.build.resolve import resolve
from fairlead_runtime.grammar.compile import with_definition
from fairlead_runtime.models import files, tokenizer_files
from fairlead_runtime.models.model_error import ModelError
from fairlead_runtime.settings.engine_config import EngineConfig
from support import tiny


@pytest.mark.parametrize(
    ("cpus", "others", "cached", "ranks", "threads"),
    [
        (1, True, False, 1, 1),
        (1, True, True, 1, 1),
        (2, True, False, 1, 2),
        (2, True, True, 1, 1),
        (2, False, True, 1, 2),
        (3, True, False, 1, 2),
        (8, True, False, 1, 7),
        (8, True, True, 1, 7),
        (8, False, False, 1, 8),
        (64, True, False, 1, 31),
        (8, True, False, 2, 3),
        (2, True, False, 4, 1),
    ],
)
def test_one_of_more_than_two_threads_is_left_to_the_http_process_and_of_two_for_small_models(
    cpus: int,
    others: bool,
    cached: bool,
    ranks: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(build_engine, "cpu_limit", lambda: cpus)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)  # torch counts cores, not CPUs
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    build_engine._limit_threads(has_http_process=others, cached=cached, ranks=ranks)
    assert chosen == [threads]


def test_a_number_of_threads_that_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "set_num_threads", pytest.fail)
    build_engine._limit_threads(has_http_process=True, cached=False, ranks=1)


def test_where_nothing_is_captured_the_cache_gets_what_was_planned_for_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan may count them for a model whose kernels turn out to allow none."""
    seen: list[Mapping[str, int]] = []
    whole = resolve

    def spy(*arguments: Any, **named: Any) -> Any:
        seen.append(named.get("measured") or {})
        return whole(*arguments, **named)

    monkeypatch.setattr("fairlead_runtime.build.build_engine.resolve", spy)
    folder = tiny.save(tiny.build("llama"), tmp_path)
    with LLM(str(folder), max_model_len=64, num_blocks=8):
        pass
    measured = next(one for one in seen if one)
    assert measured["graphs"] == 0


def test_a_tokenizer_that_another_process_has_read_is_not_read_again(tmp_path: Path) -> None:
    path = tiny.save(tiny.build("llama"), tmp_path / "model")
    tokenizer = tokenizer_files.load_tokenizer(Path(path))
    text = with_definition(tokenizer, tokenizer_files.text_facts(tokenizer))
    config = EngineConfig(num_blocks=32)
    alone = build_engine.build(path, config)
    (Path(path) / "tokenizer.json").write_text("{")
    told = build_engine.build(path, config, text=lambda: text)
    assert (told.grammar_facts, told.facts) == (alone.grammar_facts, alone.facts)
    assert told.grammar_facts is not None
    # Where the other one could not, the reason is found here.
    with pytest.raises(ModelError, match="tokenizer"):
        build_engine.build(path, config, text=lambda: None)


def test_a_models_files_are_checked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A large vocabulary's take tenths of a second."""
    folder, checked = tiny.save(tiny.build("llama"), tmp_path), list[Path]()
    check = files.check

    def counted(path: Path, **settings: bool) -> files.ModelFiles:
        checked.append(path)
        return check(path, **settings)

    monkeypatch.setattr(files, "check", counted)
    built = build_engine.build(folder, EngineConfig(max_model_len=64, num_blocks=8))
    built.close()
    assert checked == [folder]
