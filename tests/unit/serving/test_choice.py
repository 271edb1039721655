"""Stop texts: however a text is split, it ends where the first stop text begins."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_runtime.outputs import ChoiceEvent, Submission
from fairlead_runtime.request.sequence import Failure, FailureKind, FinishReason, SamplingParams
from fairlead_runtime.serving.choice import ChoiceText, StopTexts
from fairlead_runtime.serving.detokenize import Vocabulary

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def shown(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None, bool]:
    """(text shown, stop text found, whether something was shown that a later stop text covers)."""
    finder, text, whole = StopTexts(stops), "", "".join(pieces)
    ends = [at for stop in stops if (at := whole.find(stop)) >= 0]
    too_much = False
    for i, piece in enumerate(pieces):
        part, stop = finder.add(piece, last=i == len(pieces) - 1)
        text += part
        # A stop text that completes ends the text, also where one that began earlier is incomplete.
        too_much |= stop is None and bool(ends) and len(text) > min(ends)
        if stop is not None:
            return text, stop, too_much
    return text, None, too_much


@given(LETTERS, STOPS, st.lists(st.integers(0, 30), max_size=8))
def test_the_text_ends_where_a_stop_text_begins_whatever_the_pieces(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    got, stop, too_much = shown(stops, pieces)
    assert not too_much
    found = [at for each in stops if (at := text.find(each)) >= 0]
    if not found:
        assert (got, stop) == (text, None)
    else:
        assert stop is not None
        assert (got + stop) == text[: len(got) + len(stop)]
        # A longer stop text that began earlier may complete later; the one that completes first
        # wins.
        assert len(got) >= min(found)


def test_of_two_stop_texts_in_one_piece_the_leftmost_ends_the_text() -> None:
    assert StopTexts(("c", "b")).add("abc", last=False) == ("a", "b")
    assert StopTexts(("bc", "b")).add("abc", last=False) == ("a", "bc"), "else the first given"


@given(LETTERS, st.lists(st.integers(0, 30), max_size=8))
def test_without_stop_texts_everything_passes_at_once(text: str, cuts: list[int]) -> None:
    finder = StopTexts(())
    for cut in cuts:
        assert finder.add(text[:cut], last=False) == (text[:cut], None)


@given(LETTERS, STOPS, st.integers(0, 30))
def test_no_stop_text_that_ends_within_min_tokens_counts(
    text: str, stops: tuple[str, ...], minimum: int
) -> None:
    """One letter is one token here."""
    finder, shown_text, found = StopTexts(stops), "", None
    for i, letter in enumerate(text):
        part, found = finder.add(letter, last=i == len(text) - 1, may_stop=i >= minimum)
        shown_text += part
        if found is not None:
            break
    ends = [end for end in range(minimum + 1, len(text) + 1) if text[:end].endswith(stops)]
    if not ends:
        assert (shown_text, found) == (text, None)
    else:
        assert found is not None
        assert shown_text + found == text[: ends[0]]


def test_a_stop_text_can_stay_in_the_output() -> None:
    finder = StopTexts(("END", "E"), included=True)
    assert finder.add("the EN", last=False, may_stop=False) == ("the ", None)
    assert finder.add("D of it", last=False) == ("END", "END")


def test_a_stop_text_that_begins_again_within_itself_is_found() -> None:
    finder = StopTexts(("aab", "abab_"))
    assert finder.add("aaa", last=False) == ("a", None)
    assert finder.add("b", last=False) == ("", "aab")
    finder = StopTexts(("abac",))
    assert finder.add("aba", last=False) == ("", None)
    assert finder.add("bac", last=False) == ("ab", "abac")


def test_only_what_may_become_a_stop_text_is_held_back() -> None:
    finder = StopTexts(("END",))
    assert finder.add("the E", last=False) == ("the ", None)
    assert finder.add("N", last=False) == ("", None)
    assert finder.add("x EN", last=False) == ("ENx ", None)
    assert finder.add("", last=True) == ("EN", None)


VOCABULARY = Vocabulary(
    decode=lambda ids: "".join("abcdefgh"[number] for number in ids),
    special=frozenset(),
    token_bytes={},
    byte_level=False,
    token_text=lambda number: "abcdefgh"[number],
)


def choice(**params: Any) -> ChoiceText:
    submission = Submission(prompt=(0,), params=SamplingParams(**params))
    return ChoiceText(0, submission, VOCABULARY)


@pytest.mark.parametrize(
    ("finish", "text"), [(FinishReason.STOP, "bc"), (FinishReason.LENGTH, "bcd")]
)
def test_a_stop_token_counts_and_is_not_shown(finish: FinishReason, text: str) -> None:
    events = [ChoiceEvent("r", 0, token, None, None) for token in (1, 2)]
    one = choice(stop_token_ids=(3,))
    output, stopped_early = one.take([*events, ChoiceEvent("r", 0, 3, None, finish)])
    assert (output.token_ids, output.text) == ((1, 2, 3), text)
    assert (output.finish_reason, stopped_early) == (finish, False)
    assert output.stop_reason == (3 if finish is FinishReason.STOP else None)
    assert one.finished


def test_a_stop_text_within_min_tokens_ends_nothing() -> None:
    """min_tokens outlast stop texts: the text goes on until one ends in a later token."""
    one = choice(stop="b", min_tokens=2, max_tokens=9)
    pieces = []
    for token in (1, 1, 1):
        output, ended = one.take([ChoiceEvent("r", 0, token, None, None)])
        pieces.append(output.text)
    assert ended
    assert "".join(pieces) == "bb"


def test_a_kept_stop_token_is_shown_and_a_kept_stop_text_ends_the_text() -> None:
    kept = choice(include_stop_str_in_output=True, stop_token_ids=(1,))
    output, _ = kept.take([ChoiceEvent("r", 0, 1, None, FinishReason.STOP)])
    assert output.text == "b"
    text = choice(include_stop_str_in_output=True, stop="b")
    output, ended = text.take([ChoiceEvent("r", 0, 1, None, None)])
    assert ended
    assert output.text == "b"


@pytest.mark.parametrize(("skips", "text"), [(True, "bd"), (False, "bcd")])
def test_special_tokens_are_text_where_the_request_wants_them(skips: bool, text: str) -> None:
    vocabulary = dataclasses.replace(VOCABULARY, special=frozenset({2, 4}))
    submission = Submission(prompt=(0,), params=SamplingParams(skip_special_tokens=skips))
    tokens = [ChoiceEvent("r", 0, token, None, None) for token in (1, 2, 3)]
    end = ChoiceEvent("r", 0, 4, None, FinishReason.STOP)
    assert ChoiceText(0, submission, vocabulary).take([*tokens, end])[0].text == text


def test_the_last_output_has_the_failure() -> None:
    failure = Failure("why", FailureKind.CONSTRAINTS)
    event = ChoiceEvent("r", 0, None, None, FinishReason.ERROR, failure)
    choice = ChoiceText(0, Submission(prompt=(0,)), VOCABULARY)
    assert choice.take([event])[0].failure == failure


@given(st.lists(st.integers(0, 3), min_size=2, max_size=8))
def test_an_output_of_several_tokens_says_how_long_the_text_of_each_is(tokens: list[int]) -> None:
    together, alone = choice(max_tokens=99), choice(max_tokens=99)
    events = [ChoiceEvent("r", 0, token, None, None) for token in tokens]
    output, _ = together.take(events)
    texts = [alone.take([event])[0].text for event in events]
    assert (output.text, output.lengths) == ("".join(texts), tuple(map(len, texts)))
