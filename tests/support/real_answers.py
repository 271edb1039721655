"""transformers' greedy answers of SmolLM2 to forty conversations and in one of ten turns, stored
beside the tests because one by one they take minutes:

    PYTHONPATH=tests .venv/bin/python -m support.real_answers
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fairlead_runtime.models import chat, loading
from fairlead_runtime.models.loading import LoadedModel
from fairlead_runtime.settings.engine_config import EngineConfig
from support.real_weights import SMOLLM2

FOLDER = Path(__file__).parents[1] / "functional" / "real_weights"
FILE = FOLDER / "answers.json"
LONGEST = 200  # tokens
TURN = 32  # tokens of an answer in the conversation of ten turns
QUESTIONS = (
    "Hello! My name is Ada, and I sail to the island of Sylt tomorrow.",
    "What should I take with me?",
    "Which of these is the most important?",
    "Write a haiku about the sea, please.",
    "Now say the same in one plain sentence.",
    "How do you write 'good morning' in French and in Japanese?",
    "What is 12 + 30?",
    "Write a line of Python that prints it.",
    "Do you remember my name?",
    "Thank you, goodbye! 👋",
)


class Answer(NamedTuple):
    """``margins``: by how much the logit of each token is above the second largest, four digits."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]

    @classmethod
    def read(cls, name: str = "answers") -> list[Self]:
        """``name``: "answers", of forty conversations, or "turns", of one."""
        return [cls(**answer) for answer in json.loads(FILE.read_text())[name]]


def conversations() -> list[list[dict[str, str]]]:
    stored: list[list[dict[str, str]]] = json.loads((FOLDER / "conversations.json").read_text())
    return stored


def prompt_of(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    return chat.encode_chat(tokenizer, chat.render_chat(tokenizer, messages))


def load() -> LoadedModel:
    return loading.load(SMOLLM2.folder(), config=EngineConfig(dtype="float32"))


@torch.inference_mode()
def answer(loaded: LoadedModel, messages: list[dict[str, str]], longest: int = LONGEST) -> Answer:
    """By ``generate`` alone."""
    model: Any = loaded.model
    prompt = prompt_of(loaded.tokenizer, messages)
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=longest,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(made.logits).topk(2).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    tokens = made.sequences[0, len(prompt) :].tolist()
    return Answer(prompt, tokens, [float(f"{margin:.4g}") for margin in margins])


def dialogue(loaded: LoadedModel) -> list[Answer]:
    """The answers to QUESTIONS, each with all that was said before it."""
    said: list[dict[str, str]] = []
    turns = []
    for question in QUESTIONS:
        said.append({"role": "user", "content": question})
        turns.append(answer(loaded, said, TURN))
        said.append({"role": "assistant", "content": text_of(loaded.tokenizer, turns[-1])})
    return turns


def text_of(tokenizer: PreTrainedTokenizerBase, answered: Answer) -> str:
    return str(tokenizer.decode(answered.tokens, skip_special_tokens=True))


def main() -> None:
    loaded = load()
    answers = [answer(loaded, each) for each in tqdm(conversations(), unit="answer")]
    turns = dialogue(loaded)
    made = {
        "model": f"{SMOLLM2.name}, the file of SHA-256 {SMOLLM2.sha256}, in float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    text = json.dumps(made, indent=1).removesuffix("\n}")
    for name, group in {"answers": answers, "turns": turns}.items():
        lines = ",\n".join(json.dumps(each._asdict()) for each in group)
        text += f',\n "{name}": [\n{lines}\n]'
    FILE.write_text(f"{text}}}\n")


if __name__ == "__main__":
    main()
