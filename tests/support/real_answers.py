"""transformers' greedy answers of SmolLM2 to forty conversations, stored beside the tests because
one by one they take minutes:

    PYTHONPATH=tests .venv/bin/python -m support.real_answers
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fairlead_runtime.config import EngineConfig
from fairlead_runtime.models import chat, loading
from fairlead_runtime.models.loading import LoadedModel
from support.real_weights import SMOLLM2

FOLDER = Path(__file__).parents[1] / "functional" / "real_weights"
FILE = FOLDER / "answers.json"
LONGEST = 200  # tokens


class Answer(NamedTuple):
    """``margins``: by how much the logit of each token is above the second largest, four digits."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]

    @classmethod
    def read(cls) -> list[Self]:
        return [cls(**answer) for answer in json.loads(FILE.read_text())["answers"]]


def conversations() -> list[list[dict[str, str]]]:
    stored: list[list[dict[str, str]]] = json.loads((FOLDER / "conversations.json").read_text())
    return stored


def prompt_of(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    return chat.encode_chat(tokenizer, chat.render_chat(tokenizer, messages))


def load() -> LoadedModel:
    return loading.load(SMOLLM2.folder(), config=EngineConfig(dtype="float32"))


@torch.inference_mode()
def answer(loaded: LoadedModel, messages: list[dict[str, str]]) -> Answer:
    """By ``generate`` alone."""
    model: Any = loaded.model
    prompt = prompt_of(loaded.tokenizer, messages)
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=LONGEST,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(made.logits).topk(2).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    tokens = made.sequences[0, len(prompt) :].tolist()
    return Answer(prompt, tokens, [float(f"{margin:.4g}") for margin in margins])


def main() -> None:
    loaded = load()
    answers = [answer(loaded, each) for each in tqdm(conversations(), unit="answer")]
    made = {
        "model": f"{SMOLLM2.name}, the file of SHA-256 {SMOLLM2.sha256}, in float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    lines = ",\n".join(json.dumps(each._asdict()) for each in answers)
    head = json.dumps(made, indent=1).removesuffix("\n}")
    FILE.write_text(f'{head},\n "answers": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
