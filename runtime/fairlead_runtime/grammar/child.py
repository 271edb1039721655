"""The program that checks grammars: ``python -m fairlead_runtime.grammar.child``.

It builds the tokenizer once; each check compiles hostile input in a fork (``child.forks``). Owns
the messages, which ``child.program`` numbers: in, first ``Setup``, then one ``Check`` for each
question, at most MAX_FORKS unanswered; out, one ``Checked`` for each, in order of completion.
"""

import functools
import json
import random
import sys
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from fairlead_runtime.child.forks import Ending, Forks
from fairlead_runtime.child.frames import Channel, Codec, Message
from fairlead_runtime.child.heap import allocated_bytes, release_memory
from fairlead_runtime.child.life import parent_socket
from fairlead_runtime.grammar.compile import (
    NO_OUTPUT,
    CheckLimits,
    GrammarError,
    TokenizerFacts,
    check,
    compile_matcher,
    enforced,
)
from fairlead_runtime.request.structured import TOO_COMPLEX, StructuredOutputs

MAX_FORKS = 2  # checks at a time
WALKS = 2  # random outputs that a check begins
WALK_TOKENS = 32  # of each

TIMED_OUT = "takes too long to compile: simplify its patterns, counts or alternatives"
FAILED = "cannot be compiled here: simplify it"
CRASHED = "takes too much memory to compile: simplify its patterns, counts or alternatives"


class Setup(Message):
    facts: TokenizerFacts
    limits: CheckLimits


class Check(Message):
    """``outputs``: the fields of StructuredOutputs as JSON, because MessagePack has no integers
    beyond 64 bits, which a schema may hold.
    """

    outputs: str


class Checked(Message):
    """``error``: why it cannot be compiled; empty when it can. ``enforced``: what is compiled in
    place of the source; empty for the source. ``size`` of the compiled grammar in bytes.
    ``seconds`` that the check took. ``late``: it was killed before it had its processor time, and
    the rest says nothing.
    """

    error: str
    enforced: str = ""
    size: int = 0
    seconds: float = 0.0
    late: bool = False


QUESTION: Codec[tuple[int, Setup | Check]] = Codec(tuple[int, Setup | Check])
ANSWER: Codec[tuple[int, Checked]] = Codec(tuple[int, Checked])


def main() -> int:
    channel = Channel(parent_socket(), ANSWER, QUESTION)
    first = channel.receive()
    if first is None or not isinstance(first[1], Setup):
        return 0
    facts, limits = first[1].facts, first[1].limits
    tokenizer, size = facts.build(fast=False), facts.size
    del first, facts
    release_memory()
    forks = Forks(limits, ANSWER, functools.partial(_answer, tokenizer, size), _verdict)
    forks.serve(channel)
    return 0


def _answer(tokenizer: LLTokenizer, ids: int, question: Check) -> Checked:
    return _check(tokenizer, ids, json.loads(question.outputs))


def _verdict(checked: Checked | Ending, seconds: float) -> Checked:
    match checked:
        case Ending.LATE:
            checked = Checked("", late=True)
        case Ending.SLOW:
            checked = Checked(TIMED_OUT)
        case Ending.CRASHED:
            checked = Checked(CRASHED)
        case Ending.FAILED:
            checked = Checked(FAILED)
    checked.seconds = seconds
    return checked


def _check(tokenizer: LLTokenizer, ids: int, fields: dict[str, Any]) -> Checked:
    """Compile as the engine will: from what is enforced."""
    try:
        outputs = StructuredOutputs(**fields)
        source = enforced(tokenizer, outputs)
        before = allocated_bytes()
        matcher = compile_matcher(tokenizer, outputs.checked(0, source))
        size = max(0, allocated_bytes() - before)
        for walk in range(WALKS):
            _walk(matcher.deep_copy(), ids, random.Random(walk))  # noqa: S311 - not for secrets
    except GrammarError as error:
        return Checked(str(error))
    except MemoryError:
        return Checked(CRASHED)
    return Checked("", source, size)


def _walk(matcher: LLMatcher, ids: int, choose: random.Random) -> None:
    """Follow the beginning of a random output. Raises GrammarError where no token is allowed or a
    limit is exceeded.
    """
    for _ in range(WALK_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        _check_mask(matcher)
        if matcher.is_stopped():
            return
        if not allowed:
            raise GrammarError(NO_OUTPUT)
        start = choose.randrange(ids)
        later = allowed >> start
        token = start + _lowest_bit(later) if later else _lowest_bit(allowed)
        matcher.consume_token(token)
        _check_mask(matcher)


def _lowest_bit(value: int) -> int:
    return (value & -value).bit_length() - 1


def _check_mask(matcher: LLMatcher) -> None:
    try:
        check(matcher)
    except GrammarError as error:
        raise GrammarError(NO_OUTPUT if str(error) == NO_OUTPUT else TOO_COMPLEX) from None


if __name__ == "__main__":
    sys.exit(main())
