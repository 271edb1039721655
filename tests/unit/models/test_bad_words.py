"""Bad words as token ids, by vLLM's rule."""

import pytest

from fairlead_runtime.models.chat import bad_word_ids
from fairlead_runtime.request.sequence import RequestError
from support.byte_tokenizer import byte_level

SPACE = "\u0120"  # the byte alphabet's space
TOKENIZER = byte_level(
    [("n", "o"), (SPACE, "no"), ("y", "e"), ("ye", "s"), ("c", "a")], max_length=64
)


def ids(*pieces: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.convert_tokens_to_ids(list(pieces)))


def test_a_word_is_bad_alone_and_after_a_space_where_that_is_as_many_tokens() -> None:
    # " yes" is two tokens, of which the first is a space: forbidding it would forbid "yes" twice.
    assert bad_word_ids(TOKENIZER, ["no", "yes", " no", "cat"]) == (
        ids("no"),
        ids(SPACE + "no"),
        ids("yes"),
        ids("no"),
        ids(SPACE + "no"),
        ids("ca", "t"),
    )


def test_words_that_are_ids_stay_as_they_are() -> None:
    assert bad_word_ids(TOKENIZER, [(5, 6), "cat"]) == ((5, 6), ids("ca", "t"))


def test_a_word_that_is_no_text_is_refused_by_its_field() -> None:
    with pytest.raises(RequestError, match="bad_words: "):
        bad_word_ids(TOKENIZER, ["\ud800"])
