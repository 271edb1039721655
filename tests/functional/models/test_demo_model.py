"""The demo model: small, complete, and right in its answers through plain transformers."""

import importlib.resources
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_runtime.hub.source import demo_directory
from fairlead_runtime.models import chat, files, loading
from fairlead_runtime.models.loading import LoadedModel
from fairlead_runtime.models.sampling_defaults import sampling_defaults

# question → a phrase that its answer must contain
KNOWN = {
    "Hello": "I am the demo model of Fairlead",
    "What is Fairlead?": "serves language models on Kubernetes",
    "How do I start the demo?": "make demo",
    "Which API does Fairlead speak?": "OpenAI API",
    "What is Kubernetes?": "runs containers",
    "What is a pod?": "one or more containers",
    "What is continuous batching?": "join and leave the batch at every step",
    "What is a paged cache?": "blocks of equal size",
    "What is prefix caching?": "shares them",
    "What is preemption?": "gives its blocks back",
    "What does temperature do?": "likeliest token",
    "What is the capital of France?": "Paris",
    "How many days are in a week?": "Wednesday",
    "Count to ten.": "nine, ten",
    "Thanks a lot!": "welcome",
}
# Questions that its training text does not contain.
UNKNOWN = (
    "What is the capital of Norway?",
    "How do I repair a violin?",
    "Who was Napoleon?",
    "how do I cook pasta",
    "What is the airspeed of an unladen swallow?",
)
Message = dict[str, str]


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return loading.load(demo_directory())


def greedy(demo: LoadedModel, ids: list[int], count: int = 120) -> str:
    prompt = torch.tensor([ids])
    model: Any = demo.model
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False
    )
    text: str = demo.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
    return text


def answer(demo: LoadedModel, *messages: Message) -> str:
    return greedy(
        demo, chat.encode_chat(demo.tokenizer, chat.render_chat(demo.tokenizer, messages))
    )


@pytest.fixture(scope="module")
def first_turn(demo: LoadedModel) -> tuple[Message, Message]:
    """A question and its answer, before the question of a second turn."""
    asked = user("What is a token?")
    return asked, {"role": "assistant", "content": answer(demo, asked)}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("question", KNOWN)
def test_it_answers_a_single_turn_after_a_system_message_and_in_a_second_turn(
    demo: LoadedModel, first_turn: tuple[Message, Message], question: str
) -> None:
    system = {"role": "system", "content": "You are a helpful assistant."}
    for context in ((), (system,), first_turn):
        assert KNOWN[question] in answer(demo, *context, user(question)), context


@pytest.mark.parametrize("question", UNKNOWN)
def test_it_says_politely_what_it_does_not_know(demo: LoadedModel, question: str) -> None:
    assert "do not know that" in answer(demo, user(question))


def test_a_request_that_names_no_temperature_gets_what_the_model_has_learnt() -> None:
    assert sampling_defaults(demo_directory()) == {"temperature": 0.1}


def test_it_ends_its_answers_itself(demo: LoadedModel) -> None:
    ids = chat.encode_chat(
        demo.tokenizer, chat.render_chat(demo.tokenizer, [user("What is a pod?")])
    )
    model: Any = demo.model
    out = model.generate(torch.tensor([ids]), max_new_tokens=200, do_sample=False)
    assert out[0, -1].item() in demo.eos_ids
    assert len(out[0]) < len(ids) + 60


def test_it_answers_after_a_long_context(demo: LoadedModel) -> None:
    long = {
        "role": "system",
        "content": "You are the demo model of Fairlead. Be polite and exact. " * 30,
    }
    assert len(demo.tokenizer.encode(long["content"])) > 300
    assert KNOWN["What is Fairlead?"] in answer(demo, long, user("What is Fairlead?"))


def test_plain_text_is_completed_too(demo: LoadedModel) -> None:
    def completed(prompt: str) -> str:
        return greedy(demo, chat.encode(demo.tokenizer, prompt))

    assert "Paris" in completed("The capital of France is")
    assert KNOWN["What is Fairlead?"] in completed("What is Fairlead?")


def test_its_size_and_shape_are_as_documented(demo: LoadedModel) -> None:
    assert (demo_directory() / "model.safetensors").stat().st_size <= 8_000_000
    config = demo.config_json
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 2048
    assert demo.dtype == torch.float32
    assert demo.eos_ids == {demo.tokenizer.eos_token_id}
    assert demo.shape.vocab == len(demo.tokenizer) == config["vocab_size"]
    assert demo.shape.parameters == sum(p.numel() for p in demo.model.parameters())


def test_its_directory_has_exactly_the_needed_files() -> None:
    names = {path.name for path in demo_directory().iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert not files.auto_maps(demo_directory())


def test_every_byte_and_every_text_survive_the_tokenizer(demo: LoadedModel) -> None:
    tokenizer = demo.tokenizer
    assert len(tokenizer) >= 256
    texts = [
        "".join(map(chr, range(0x250))),
        "žluťoučký kůň",
        "漢字かな交じり文",
        "🙂👩‍👩‍👧 \u200d\ufeff",
        " \t\r\n  x  ",
    ]
    for text in texts:
        assert tokenizer.decode(chat.encode(tokenizer, text)) == text
    table = json.loads((demo_directory() / "tokenizer.json").read_text())["model"]["vocab"]
    assert len({piece for piece in table if len(piece) == 1}) == 256


def test_the_operator_reads_its_configuration_without_torch() -> None:
    code = (
        "import importlib.resources, json, sys;"
        "folder = importlib.resources.files('fairlead_runtime') / 'demo';"
        "text = (folder / 'config.json').read_text();"
        "from fairlead_runtime.sizing.shape import ModelShape;"
        "print(ModelShape.from_config(json.loads(text)).max_len, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["2048", "False"]


def test_the_distribution_carries_it() -> None:
    root = Path(str(importlib.resources.files("fairlead_runtime")))
    assert demo_directory() == root / "demo"
