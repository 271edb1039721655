"""The script that makes the demo model is reproducible, and the shipped files match its text."""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fairlead_runtime.hub.source import demo_directory

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        spec = importlib.util.spec_from_file_location(
            "make_demo_model", SCRIPTS / "make_demo_model.py"
        )
        if spec is None or spec.loader is None:
            raise FileNotFoundError(SCRIPTS)
        module = importlib.util.module_from_spec(spec)
        sys.modules["make_demo_model"] = module
        spec.loader.exec_module(module)
    return module


def test_the_shipped_tokenizer_is_the_one_trained_on_the_text(script: ModuleType) -> None:
    """After an edit of the text, the model must be trained again."""
    tokenizer = script.train_tokenizer(script.read_text())
    shipped = json.loads((demo_directory() / "tokenizer.json").read_text())
    assert json.loads(tokenizer.backend_tokenizer.to_str())["model"] == shipped["model"]
    settings = json.loads((demo_directory() / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == tokenizer.chat_template


def test_the_shipped_configuration_is_that_of_the_script(script: ModuleType) -> None:
    config = script.make_model().config.to_dict()
    shipped = json.loads((demo_directory() / "config.json").read_text())
    different = {key: value for key, value in shipped.items() if config.get(key, value) != value}
    assert set(different) <= {"architectures", "dtype"}


def test_two_runs_give_the_same_bytes(script: ModuleType, tmp_path: Path) -> None:
    def digest(name: str) -> str:
        text = script.read_text()
        tokenizer = script.train_tokenizer(text)
        model = script.make_model()
        lessons = script.Lessons(tokenizer, text)
        script.train(model, lessons, 2)
        script.save(model, tokenizer, tmp_path / name)
        return hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest()

    assert digest("first") == digest("second")


def test_the_lessons_have_labels_for_answers_only(script: ModuleType) -> None:
    text = script.read_text()
    tokenizer = script.train_tokenizer(text)
    lessons = script.Lessons(tokenizer, text)
    answers = {pair.answer for pair in [*text.known, text.unknown]}
    ids, labels = next(lessons.batches(script.BATCH))
    assert ids.shape == labels.shape
    for row, row_labels in zip(ids.tolist(), labels.tolist(), strict=True):
        labelled = tokenizer.decode([label for label in row_labels if label >= 0])
        for part in labelled.removesuffix("<|end|>").split("<|end|>"):
            assert part.strip("\n") in answers
        assert all(label in {-100, token} for token, label in zip(row, row_labels, strict=True))


def test_the_text_has_40_to_120_answers_and_no_question_twice(script: ModuleType) -> None:
    text = script.read_text()
    assert 40 <= len(text.known) <= 120
    assert all(pair.questions and pair.answer for pair in text.known)
    questions = [question for pair in text.known for question in pair.questions]
    assert len(set(questions)) == len(questions)
    assert torch.get_default_dtype() == torch.float32
