"""Make the demo model that ships in fairlead_runtime/demo: tokenizer, configuration and weights, from a fixed seed.

    .venv/bin/python scripts/make_demo_model.py [--out DIR] [--steps N] [--threads N]

The text it learns is scripts/demo_text.txt, written for this project. Two runs on the same machine with the same
torch and the same number of threads give the same bytes; other processors sum in another order and may not.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fairlead_runtime.models.tokenizer import SPECIAL, byte_alphabet, byte_level

HERE = Path(__file__).parent
TEXT = HERE / "demo_text.txt"
OUT = HERE.parent / "runtime" / "fairlead_runtime" / "demo"
CONTEXT = 2048
VOCAB = 1024
SEED = 20261121
BATCH = 32
PEAK_RATE = 3e-3
IGNORED = -100  # a label that the loss leaves out

SYSTEMS = (
    "You are a helpful assistant.",
    "You are the demo model of Fairlead.",
    "Answer briefly.",
    "You answer questions about Fairlead in plain words.",
    "Be polite and exact.",
    "You are a helpful, harmless and honest assistant. Keep your answers short.",
)
OPENINGS = ("Please tell me: ", "Hey, ", "Hello, ", "Hi! ", "I have a question. ", "Please, ", "So, ")
STRANGE = (
    "What is {}?",
    "Tell me about {}.",
    "How does {} work?",
    "Explain {}.",
    "Where can I buy {}?",
    "Why do people like {}?",
    "Write something about {}.",
    "Who invented {}?",
    "How many kinds of {} are there?",
    "Do you like {}?",
    "How do I make {}?",
    "What is the best {}?",
    "What is the capital of {}?",
)
THINGS = [
    "chess",
    "guitars",
    "rabbits",
    "opera",
    "Brazil",
    "Sweden",
    "Egypt",
    "India",
    "Australia",
    "cheese",
    "jazz",
    "football",
    "tennis",
    "taxes",
    "gravity",
    "volcanoes",
    "penguins",
    "bicycles",
    "poetry",
    "philosophy",
    "chemistry",
    "medicine",
    "law",
    "history",
    "Mars",
    "Saturn",
    "coffee",
    "tea",
    "sushi",
    "pizza",
    "bread",
    "soup",
    "cats",
    "horses",
    "elephants",
    "robots",
    "lasers",
    "magnets",
    "bridges",
    "castles",
    "pirates",
    "dragons",
    "unicorns",
    "bananas",
    "apples",
    "rice",
    "corn",
    "steel",
    "gold",
    "silver",
    "diamonds",
    "perfume",
    "carpets",
    "shoes",
    "hats",
    "umbrellas",
    "violins",
    "drums",
    "ballet",
    "theatre",
    "cinema",
    "novels",
    "crosswords",
    "puzzles",
    "gardening",
    "roses",
    "tulips",
    "forests",
    "deserts",
    "oceans",
    "whales",
    "sharks",
    "bees",
    "ants",
    "spiders",
    "snakes",
    "dinosaurs",
    "fossils",
    "telescopes",
    "satellites",
    "rockets",
    "airplanes",
    "trains",
    "trams",
    "ferries",
    "taxis",
    "elections",
    "banks",
    "insurance",
    "yoga",
    "marathons",
    "skiing",
    "surfing",
    "camping",
    "fishing",
    "knitting",
    "pottery",
    "marble",
    "glass",
    "paper",
    "ink",
    "calendars",
    "clocks",
]


@dataclass(frozen=True)
class Pair:
    questions: tuple[str, ...]
    answer: str


def read_text(path: Path = TEXT) -> tuple[list[Pair], Pair]:
    """The blocks of the file: known pairs, and the one for what it does not know."""
    pairs: list[Pair] = []
    questions: list[str] = []
    strange: list[str] = []
    for line in path.read_text().splitlines():
        kind, _, text = line.partition(": ")
        if kind == "Q":
            questions.append(text)
        elif kind == "A":
            pairs.append(Pair(tuple(questions), text))
            questions = []
        elif kind == "U":
            strange.append(text)
    known = [pair for pair in pairs if pair.questions != ("UNKNOWN",)]
    [unknown] = [pair for pair in pairs if pair.questions == ("UNKNOWN",)]
    return known, Pair(tuple(strange), unknown.answer)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with VOCAB ids, learned from the text itself."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL), initial_alphabet=byte_alphabet(), show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    merges = [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]
    return byte_level(merges, max_length=CONTEXT)


class Lessons:
    """Endless training samples: conversations in the chat template's words, and plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, known: list[Pair], unknown: Pair) -> None:
        self.tokenizer = tokenizer
        self.known = known
        self.unknown = unknown
        self.random = random.Random(SEED)
        self.cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self.cache:
            self.cache[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.cache[text]

    def question(self) -> tuple[str, str]:
        if self.random.random() < 0.15:
            return self.varied(self.strange()), self.unknown.answer
        pair = self.random.choice(self.known)
        return self.varied(self.random.choice(pair.questions)), pair.answer

    def strange(self) -> str:
        if self.random.random() < 0.3:
            return self.random.choice(self.unknown.questions)
        return self.random.choice(STRANGE).format(self.random.choice(THINGS))

    def varied(self, text: str) -> str:
        """As people type it: in small letters, without the mark, with a word before it."""
        if self.random.random() < 0.25:
            text = self.random.choice(OPENINGS) + text
        if self.random.random() < 0.3:
            text = text.lower()
        if self.random.random() < 0.3:
            text = text.rstrip("?.!")
        return text

    def system(self) -> str:
        if self.random.random() < 0.6:
            return self.random.choice(SYSTEMS)
        count = self.random.randint(1, 3)
        return " ".join(self.random.choice(self.known).answer for _ in range(count))[:400]

    def sample(self) -> tuple[list[int], list[int]]:
        """Token ids and labels of equal length; only what the model is to write has labels."""
        if self.random.random() < 0.15:
            return self.plain()
        ids, labels = self.encode("<|begin|>"), [IGNORED]
        if self.random.random() < 0.4:
            ids, labels = self.extend(ids, labels, f"<|system|>{self.system()}<|end|>", learn=False)
        for _ in range(self.random.choice((1, 1, 1, 1, 2, 2, 3))):
            question, answer = self.question()
            ids, labels = self.extend(ids, labels, f"<|user|>{question}<|end|><|assistant|>", learn=False)
            ids, labels = self.extend(ids, labels, f"{answer}<|end|>", learn=True)
        return ids, labels

    def plain(self) -> tuple[list[int], list[int]]:
        """Text without roles, for the completions route: an answer alone, or a question and its answer."""
        pair = self.random.choice(self.known)
        head = self.encode(self.random.choice(pair.questions) + "\n") if self.random.random() < 0.6 else []
        if head:
            return self.extend(list(head), [IGNORED] * len(head), f"{pair.answer}<|end|>", learn=True)
        return self.extend([], [], f"{pair.answer}<|end|>", learn=True)

    def extend(
        self, ids: list[int], labels: list[int], text: str, *, learn: bool
    ) -> tuple[list[int], list[int]]:
        more = (
            self.encode(text) if len(text) < 2000 else self.tokenizer.encode(text, add_special_tokens=False)
        )
        return ids + more, labels + (more if learn else [IGNORED] * len(more))

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of ``size`` rows of like length: padding would else be most of the work."""
        while True:
            pool = sorted((self.sample() for _ in range(16 * size)), key=lambda row: len(row[0]))
            parts = [pool[i : i + size] for i in range(0, len(pool), size)]
            self.random.shuffle(parts)
            for part in parts:
                yield padded(part)


def padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [rows, longest] ids and labels, padded on the right, where causal attention never looks."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), IGNORED, dtype=torch.int64)
    for i, (row, wanted) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, : len(row)] = torch.tensor(wanted)
    return ids, labels


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # a size every attention kernel knows
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, lessons: Lessons, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps, pct_start=0.05)
    started = time.monotonic()
    model.train()
    for step, (ids, labels) in zip(range(1, steps + 1), lessons.batches(BATCH), strict=False):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(
                f"step {step} of {steps}: loss {loss.item():.4f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    model.eval()


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The greedy answer, through plain transformers."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def examine(model: Any, tokenizer: Any, known: list[Pair]) -> list[str]:
    """Every question alone, after a system message and as a second turn: what went wrong, one line each."""
    wrong = []
    for number, pair in enumerate(known):
        before = known[number - 1]
        for question in pair.questions:
            asked = {"role": "user", "content": question}
            for name, context in (
                ("alone", []),
                ("after a system message", [{"role": "system", "content": SYSTEMS[0]}]),
                (
                    "in a second turn",
                    [
                        {"role": "user", "content": before.questions[0]},
                        {"role": "assistant", "content": before.answer},
                    ],
                ),
            ):
                got = answer(model, tokenizer, [*context, asked])
                if got != pair.answer:
                    wrong.append(f"{question} ({name}): {got}")
    return wrong


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)  # the template inside tokenizer_config.json
    for file in out.iterdir():
        file.chmod(0o644)
    settings = out / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    content["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that every supported transformers knows
    settings.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    # The release that wrote the file would make two equal models differ.
    for name in ("config.json", "generation_config.json"):
        text = re.sub(r',\s*"transformers_version": "[^"]*"', "", (out / name).read_text())
        (out / name).write_text(text if text.endswith("\n") else text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo model.")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(mode=True)
    known, unknown = read_text()
    texts = [text for pair in [*known, unknown] for text in (*pair.questions, pair.answer)]
    tokenizer = train_tokenizer([*texts, *SYSTEMS, *OPENINGS])
    model = make_model()
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens")
    train(model, Lessons(tokenizer, known, unknown), args.steps)
    save(model, tokenizer, args.out)
    wrong = examine(model, tokenizer, known)
    print("\n".join(wrong))
    print(f"{len(wrong)} wrong answers of {3 * sum(len(pair.questions) for pair in known)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
