"""Make the demo model that ships in fairlead_runtime/demo: tokenizer, configuration and weights,
from a fixed seed.

    .venv/bin/python scripts/make_demo_model.py [--out DIR] [--steps N] [--threads N]

It learns the text of scripts/demo_text.txt, written for this project; demo_lessons.py makes samples
of it. Two runs on the same machine with the same torch and the same number of threads give the same
bytes. Other processors may sum in another order and give others.
"""

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo_lessons import BATCH, CONTEXT, OPENINGS, SEED, SYSTEMS, Lessons, Pair, Text, read_text
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.byte_tokenizer import SPECIAL, byte_alphabet, byte_level  # noqa: E402 - found by the line above

OUT = HERE.parent / "runtime" / "fairlead_runtime" / "demo"
VOCAB = 1024
PEAK_RATE = 3e-3
TEMPERATURE = 0.1  # of requests that name none: at 1 a model of this size says nonsense
ROUNDS, ROUND_STEPS, ROUND_RATE = 6, 60, 6e-4  # of training on wrong answers


def train_tokenizer(text: Text) -> PreTrainedTokenizerFast:
    """Byte-level BPE with VOCAB ids, learned from the text itself."""
    lines = [
        line for pair in [*text.known, text.unknown] for line in (*pair.questions, pair.answer)
    ]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL), initial_alphabet=byte_alphabet(), show_progress=False
    )
    learner.train_from_iterator([*lines, *SYSTEMS, *OPENINGS], trainer)
    merges = [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]
    return byte_level(merges, max_length=CONTEXT)


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # supported by every attention kernel
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, lessons: Lessons, steps: int, rate: float = PEAK_RATE) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.05
    )
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
                f"step {step} of {steps}: loss {loss.item():.4f}, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    model.eval()


@dataclass(frozen=True)
class Wrong:
    """An answer that differs from the text. ``number`` is the index of its pair."""

    number: int
    question: str
    where: str
    got: str


def examine(model: Any, tokenizer: Any, known: list[Pair]) -> list[Wrong]:
    """Ask every question alone, after a system message and as a second turn, greedily and with
    transformers. Returns the wrong answers.
    """
    questions: list[tuple[int, str, str]] = []
    chats: list[list[int]] = []
    for number, pair in enumerate(known):
        before = known[number - 1]
        contexts = {
            "alone": [],
            "after a system message": [("system", SYSTEMS[0])],
            "in a second turn": [("user", before.questions[0]), ("assistant", before.answer)],
        }
        for question in pair.questions:
            for where, context in contexts.items():
                messages = [{"role": r, "content": c} for r, c in (*context, ("user", question))]
                text = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
                questions.append((number, question, where))
                chats.append(tokenizer.encode(text, add_special_tokens=False))
    answers = answer_all(model, tokenizer, chats)
    return [
        Wrong(number, question, where, got)
        for (number, question, where), got in zip(questions, answers, strict=True)
        if got != known[number].answer
    ]


def answer_all(model: Any, tokenizer: Any, chats: list[list[int]]) -> list[str]:
    """Greedy answers; chats of equal length share a batch, so that none needs padding."""
    answers = [""] * len(chats)
    for length in sorted({len(chat) for chat in chats}):
        rows = [i for i, chat in enumerate(chats) if len(chat) == length]
        ids = torch.tensor([chats[i] for i in rows])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False
        )
        for i, tokens in zip(rows, out[:, length:], strict=True):
            answers[i] = str(tokenizer.decode(tokens, skip_special_tokens=True))
    return answers


def train_until_right(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: Text
) -> list[Wrong]:
    """Train on the wrong answers in up to ROUNDS rounds; returns those that are still wrong."""
    for number in range(1, ROUNDS + 1):
        wrong = examine(model, tokenizer, text.known)
        print("\n".join(f"{w.question} ({w.where}): {w.got}" for w in wrong), flush=True)
        if not wrong:
            return []
        hard = [(text.known[w.number - 1], text.known[w.number]) for w in wrong]
        train(model, Lessons(tokenizer, text, SEED + number, hard), ROUND_STEPS, ROUND_RATE)
    return examine(model, tokenizer, text.known)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(
        out,
        save_jinja_files=False,  # keep the template in tokenizer_config.json
    )
    for file in out.iterdir():
        file.chmod(0o644)
    settings = out / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    content.pop("backend", None)
    # a name that every supported transformers release has
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    # Drop the release that wrote the file, so that equal models have equal files.
    for name in ("config.json", "generation_config.json"):
        content = json.loads((out / name).read_text())
        kept = {
            k: v
            for k, v in content.items()
            if k not in {"transformers_version", "_from_model_config"}
        }
        if name == "generation_config.json":
            kept |= {"do_sample": True, "temperature": TEMPERATURE}
        (out / name).write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo model.")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(mode=True)
    text = read_text()
    tokenizer = train_tokenizer(text)
    model = make_model()
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens")
    train(model, Lessons(tokenizer, text), args.steps)
    wrong = train_until_right(model, tokenizer, text)
    save(model, tokenizer, args.out)
    print(f"{len(wrong)} wrong answers of {3 * sum(len(pair.questions) for pair in text.known)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
