"""Large texts are tokenized by a process of its own, with the ids that this one gives."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fairlead_runtime.child.program import ChildLost
from fairlead_runtime.grammar.compile import TokenizerFacts
from fairlead_runtime.hub import source
from fairlead_runtime.models import chat
from fairlead_runtime.models.encoding_child import Text
from fairlead_runtime.models.tokenizer_files import encodes_as_defined, load_tokenizer
from fairlead_runtime.outputs import ServiceError
from fairlead_runtime.request.sequence import RequestError
from fairlead_runtime.serving.prompt_encoder import (
    MAX_REST,
    POLL_SECONDS,
    Pacer,
    PromptEncoder,
)
from support import tiny

WITHIN = 300.0  # seconds; a limit for what hangs
TEXTS = ("", "a", "<|user|>hi<|end|>", "naïve 🦜🦜 \x00 \u2028 שלום", "many words and " * 5000)
LONG = "words of many letters " * 200_000


def load_demo() -> PreTrainedTokenizerBase:
    return load_tokenizer(source.resolve("demo:").path)


def encoder_of(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> PromptEncoder:
    facts = TokenizerFacts.of(tokenizer, len(tokenizer), {0})
    assert facts is not None
    return PromptEncoder(tokenizer, facts.definition, **settings)


@pytest.fixture
def encoder() -> Iterator[PromptEncoder]:
    encoder = encoder_of(tiny.tokenizer())
    yield encoder
    encoder.close()


def pid_of(encoder: PromptEncoder) -> int:
    assert encoder.child is not None
    pid = encoder.child.pid
    assert pid is not None
    return pid


def splitting() -> PreTrainedTokenizerBase:
    """Spells special tokens in a text as text."""
    tokenizer = tiny.tokenizer()
    tokenizer.split_special_tokens = True
    return tokenizer


def padding() -> PreTrainedTokenizerBase:
    """Its definition cuts and pads; requests are neither cut nor padded."""
    tokenizer: Any = tiny.tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=10)
    return tokenizer


@pytest.mark.parametrize("load", [tiny.tokenizer, load_demo, splitting, padding])
def test_the_other_process_gives_the_ids_of_this_one(load: Any) -> None:
    tokenizer = load()
    encoder = encoder_of(load())
    for special, expected in ((True, chat.encode), (False, chat.encode_chat)):
        for text in TEXTS:
            ids = encoder.encode(text, special=special, large=True)
            assert list(ids) == expected(tokenizer, text)
    assert pid_of(encoder)
    encoder.close()


def test_small_texts_and_what_is_no_text_need_no_process(encoder: PromptEncoder) -> None:
    assert list(encoder.encode("abc", special=False, large=False)) == chat.encode_chat(
        encoder.tokenizer, "abc"
    )
    with pytest.raises(RequestError, match="not valid Unicode"):
        encoder.encode("a\ud800", special=False, large=True)
    assert encoder.child is not None
    assert encoder.child.pid is None


def test_the_process_tokenizes_only_in_time_that_nothing_else_wants(
    encoder: PromptEncoder,
) -> None:
    encoder.encode("abc", special=False, large=True)
    threads = [int(each.name) for each in Path(f"/proc/{pid_of(encoder)}/task").iterdir()]
    reads, tokenizes = map(os.sched_getscheduler, sorted(threads))  # it has no pool of threads
    assert (reads, tokenizes) == (os.SCHED_OTHER, os.SCHED_IDLE)


def test_a_process_that_dies_is_replaced(encoder: PromptEncoder) -> None:
    expected = list(encoder.encode("abc", special=False, large=True))
    first = pid_of(encoder)
    os.kill(first, signal.SIGKILL)
    while encoder.child is not None and encoder.child.pid == first:
        threading.Event().wait(0.01)
    assert list(encoder.encode("abc", special=False, large=True)) == expected
    assert pid_of(encoder) != first


@pytest.mark.parametrize("program", ["import sys; sys.stdin.read(1)", "no Python"])
def test_a_text_whose_process_ends_is_refused_with_a_retry(program: str) -> None:
    encoder = encoder_of(tiny.tokenizer(), command=(sys.executable, "-c", program))
    with pytest.raises(ServiceError, match="retry") as refused:
        encoder.encode("abc", special=False, large=True)
    assert refused.value.retry_after == 1


def test_a_process_that_cannot_be_started_is_a_refusal_too() -> None:
    encoder = encoder_of(tiny.tokenizer(), command=("/no/such/program",))
    with pytest.raises(ServiceError, match="retry"):
        encoder.encode("abc", special=False, large=True)


def test_the_processor_time_of_one_text_is_bounded() -> None:
    encoder = encoder_of(tiny.tokenizer(), cpu_seconds=0.01)
    encoder.encode("abc", special=False, large=True)
    with pytest.raises(ServiceError, match="retry"):
        encoder.encode(LONG, special=False, large=True)
    encoder.close()


def test_closing_ends_the_process_in_the_middle_of_a_text(encoder: PromptEncoder) -> None:
    encoder.encode("abc", special=False, large=True)
    assert encoder.child is not None
    pid = pid_of(encoder)
    asked = encoder.child.ask(Text(LONG, False))
    encoder.close()
    assert isinstance(asked.exception(WITHIN), ChildLost)
    assert not Path(f"/proc/{pid}").exists()


def test_a_tokenizer_that_changes_texts_first_is_not_defined_by_its_rust_part() -> None:
    plain: Any = tiny.tokenizer()
    changes: Any = type("Changes", (PreTrainedTokenizerFast,), {"_encode_plus": lambda *_: [7]})
    assert encodes_as_defined(plain)
    assert not encodes_as_defined(changes(tokenizer_object=plain.backend_tokenizer))


class Clock:
    """Time that passes when somebody waits, and when ``works`` are done."""

    def __init__(self) -> None:
        self.now = 100.0
        self.works: list[tuple[float, float]] = []  # when each began and ended

    def work(self, pacer: Pacer, seconds: float) -> None:
        with pacer.before_next():
            began, self.now = self.now, self.now + seconds
            self.works.append((began, self.now))


def pacer_of(clock: Clock, monkeypatch: pytest.MonkeyPatch, busy: Any) -> Pacer:
    pacer = Pacer(busy, now=lambda: clock.now)

    def wait(seconds: float) -> bool:
        clock.now += seconds
        return False

    monkeypatch.setattr(pacer._closed, "wait", wait)
    return pacer


def test_texts_take_a_fifth_of_the_time_while_the_engine_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    pacer = pacer_of(clock, monkeypatch, lambda: True)
    for _ in range(20):
        clock.work(pacer, 0.1)
    assert clock.works[0][0] == 100.0, "the first does not wait"
    rested = [begins - ends for (_, ends), (begins, _) in itertools.pairwise(clock.works)]
    assert all(0.4 <= each < 0.4 + 2 * POLL_SECONDS for each in rested), rested
    clock.work(pacer, 60.0)
    clock.work(pacer, 0.1)
    assert clock.works[-1][0] - clock.works[-2][1] < MAX_REST + 2 * POLL_SECONDS


def test_no_text_waits_for_an_engine_that_is_idle_or_becomes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, idle_at = Clock(), 0.0
    pacer = pacer_of(clock, monkeypatch, lambda: clock.now < idle_at)
    for _ in range(3):
        clock.work(pacer, 0.1)
    assert clock.now == pytest.approx(100.3)
    idle_at = clock.now + 0.2
    clock.work(pacer, 0.1)
    assert clock.works[-1][0] == pytest.approx(idle_at, abs=2 * POLL_SECONDS)


def test_closing_ends_a_rest() -> None:
    encoder = encoder_of(tiny.tokenizer(), busy=lambda: True)
    encoder._pacer._until = time.monotonic() + 3600.0
    with ThreadPoolExecutor(1) as pool:
        resting = pool.submit(encoder.encode, "abc", special=False, large=True)
        encoder.close()
        with pytest.raises(ServiceError, match="retry"):
            resting.result(WITHIN)
    assert encoder.child is not None
    assert encoder.child.pid is None
