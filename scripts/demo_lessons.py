"""Training samples of the demo model: the text of demo_text.txt in many variations.

Owns the reader of that text and the generator of samples. Knows tokens, not weights.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

TEXT = Path(__file__).parent / "demo_text.txt"
SEED = 20261121
CONTEXT = 2048
BATCH = 32
BATCH_TOKENS = 6000  # padded; long conversations come in smaller batches
IGNORED = -100  # a label that the loss ignores

SYSTEMS = (
    "You are a helpful assistant.",
    "You are the demo model of Fairlead.",
    "Answer briefly.",
    "You answer questions about Fairlead in plain words.",
    "Be polite and exact.",
    "You are a helpful, harmless and honest assistant. Keep your answers short.",
)
OPENINGS = (
    "Please tell me: ",
    "Hey, ",
    "Hello, ",
    "Hi! ",
    "I have a question. ",
    "Please, ",
    "So, ",
)
# Other wordings of "What is X?".
TOPIC = (
    "What's {}?",
    "Explain {} to me.",
    "Can you explain {}?",
    "{}?",
    "Define {}.",
    "What exactly is {}?",
)
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


@dataclass(frozen=True)
class Pair:
    """Several wordings of a question, and their answer."""

    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Text:
    """The training text: known pairs, unknown questions with their common answer, and things that
    unknown questions are about.
    """

    known: list[Pair]
    unknown: Pair
    things: list[str]


def read_text(path: Path = TEXT) -> Text:
    pairs: list[Pair] = []
    questions: list[str] = []
    strange: list[str] = []
    things: list[str] = []
    for line in path.read_text().splitlines():
        kind, _, text = line.partition(": ")
        if kind == "Q":
            questions.append(text)
        elif kind == "A":
            pairs.append(Pair(tuple(questions), text))
            questions = []
        elif kind == "U":
            strange.append(text)
        elif kind == "T":
            things += text.split()
    known = [pair for pair in pairs if pair.questions != ("UNKNOWN",)]
    [unknown] = [pair for pair in pairs if pair.questions == ("UNKNOWN",)]
    return Text(known, Pair(tuple(strange), unknown.answer), things)


class Lessons:
    """Generates training samples: conversations in the chat template, and plain text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        text: Text,
        seed: int = SEED,
        hard: Sequence[tuple[Pair, Pair]] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.known = text.known
        self.unknown = text.unknown
        self.things = text.things
        self.hard = hard  # pairs of turns that the model got wrong
        self.random = random.Random(seed)
        self.cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self.cache:
            self.cache[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.cache[text]

    def question(self) -> tuple[str, str]:
        if self.random.random() < 0.15:
            return self.vary(self.unknown_question()), self.unknown.answer
        pair = self.random.choice(self.known)
        return self.vary(self.reworded_question(pair)), pair.answer

    def reworded_question(self, pair: Pair) -> str:
        """One of the pair's questions; a "What is X?" sometimes in another wording."""
        question = self.random.choice(pair.questions)
        topic = re.fullmatch(r"What is ([^.?]+)\?", question)
        if topic and topic[1] not in {"your name", "my name"} and self.random.random() < 0.4:
            return self.random.choice(TOPIC).format(topic[1])
        return question

    def unknown_question(self) -> str:
        if self.random.random() < 0.3:
            return self.random.choice(self.unknown.questions)
        return self.random.choice(STRANGE).format(self.random.choice(self.things))

    def vary(self, text: str) -> str:
        """The text as people type it: with a missing letter, an opening, in lower case or without
        punctuation.
        """
        if len(text) > 12 and self.random.random() < 0.08:
            slip = self.random.randrange(6, len(text) - 1)
            text = text[:slip] + text[slip + 1 :]
        if self.random.random() < 0.25:
            text = self.random.choice(OPENINGS) + text
        if self.random.random() < 0.3:
            text = text.lower()
        if self.random.random() < 0.3:
            text = text.rstrip("?.!")
        return text.upper() if self.random.random() < 0.03 else text

    def system(self) -> str:
        if self.random.random() < 0.6:
            return self.random.choice(SYSTEMS)
        return self.filler(self.random.randint(40, 400))

    def filler(self, length: int) -> str:
        """``length`` characters unrelated to the question: several answers or a repeated text."""
        once = self.random.random() < 0.5
        text = self.random.choice(self.known).answer if once else self.random.choice(SYSTEMS)
        while len(text) < length:
            text += " " + (self.random.choice(self.known).answer if once else text[: length // 3])
        return text[:length]

    def sample(self) -> tuple[list[int], list[int]]:
        """Token ids and labels of equal length; only the model's answers have labels."""
        if self.hard and self.random.random() < 0.3:
            return self.correction(*self.random.choice(self.hard))
        kind = self.random.random()
        if kind < 0.15:
            return self.plain()
        system = self.system() if self.random.random() < 0.4 else ""
        turns = self.random.choice((1, 1, 1, 1, 2, 2, 3))
        if kind < 0.18:  # a long system message must not change the answer
            system = self.filler(self.random.randint(400, 5000))
        elif kind < 0.21:
            turns = self.random.randint(4, 30)
        ids, labels = self.encode("<|begin|>"), [IGNORED]
        if system:
            ids, labels = self.extend(ids, labels, f"<|system|>{system}<|end|>", learn=False)
        for _ in range(turns):
            question, answer = self.question()
            ids, labels = self.extend(
                ids, labels, f"<|user|>{question}<|end|><|assistant|>", learn=False
            )
            ids, labels = self.extend(ids, labels, f"{answer}<|end|>", learn=True)
        return ids[:CONTEXT], labels[:CONTEXT]

    def correction(self, before: Pair, pair: Pair) -> tuple[list[int], list[int]]:
        """Two turns of which the model got the second wrong; the first keeps its exact words."""
        first = f"<|user|>{before.questions[0]}<|end|><|assistant|>{before.answer}<|end|>"
        second = f"<|user|>{self.vary(self.reworded_question(pair))}<|end|><|assistant|>"
        ids, labels = self.extend([], [], f"<|begin|>{first}{second}", learn=False)
        return self.extend(ids, labels, f"{pair.answer}<|end|>", learn=True)

    def plain(self) -> tuple[list[int], list[int]]:
        """Text without roles, for the completions route: an answer, possibly after its question."""
        pair = self.random.choice(self.known)
        if self.random.random() < 0.4:
            return self.extend([], [], f"{pair.answer}<|end|>", learn=True)
        question = self.vary(self.reworded_question(pair))
        ahead, after = self.random.choice((("\n", ""), ("", "\n")))
        ids = self.encode(question + ahead)
        return self.extend(
            list(ids), [IGNORED] * len(ids), f"{after}{pair.answer}<|end|>", learn=True
        )

    def extend(
        self, ids: list[int], labels: list[int], text: str, *, learn: bool
    ) -> tuple[list[int], list[int]]:
        more = (
            self.encode(text)
            if len(text) < 2000
            else self.tokenizer.encode(text, add_special_tokens=False)
        )
        return ids + more, labels + (more if learn else [IGNORED] * len(more))

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of at most ``size`` rows of similar length, to keep padding small."""
        while True:
            pool = sorted((self.sample() for _ in range(16 * size)), key=lambda row: len(row[0]))
            parts: list[list[tuple[list[int], list[int]]]] = [[]]
            for row in pool:
                if len(parts[-1]) == size or len(row[0]) * (len(parts[-1]) + 1) > BATCH_TOKENS:
                    parts.append([])
                parts[-1].append(row)
            self.random.shuffle(parts)
            for part in parts:
                yield pad(part)


def pad(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [rows, longest] ids and labels, padded on the right, which causal attention ignores."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), IGNORED, dtype=torch.int64)
    for i, (row, row_labels) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, : len(row)] = torch.tensor(row_labels)
    return ids, labels
