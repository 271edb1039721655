"""Streaming text: the pieces add up to the whole, and no piece ends within a character."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from fairlead_runtime.serving.detokenize import WINDOW, Detokenizer, Vocabulary, vocabulary_of
from support.byte_tokenizer import END, byte_level

FAMILY = "👩‍👩‍👧‍👦"
ALPHABET = [*"ab .\n", "é", "ß", "日", "本", "🎉", "\u200d", "👧", "\ufffd", "\u0301"]
TEXTS = st.text(alphabet=st.sampled_from(ALPHABET), max_size=60)


def byte_level_tokenizer() -> Any:
    space = "\u0120"  # stands for the space byte
    return byte_level([(space, "a"), ("a", "b"), (space + "a", "b")], max_length=64)


def sentencepiece_tokenizer() -> Tokenizer:
    """Like Llama 2's: a space mark, byte fallback, and the text's first space dropped."""
    pieces = [
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abé.日",
        "▁a",
        "ab",
        "▁ab",
        "\ufffd",
    ]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return tokenizer


BYTE_LEVEL, PIECES = byte_level_tokenizer(), sentencepiece_tokenizer()
BYTE_VOCABULARY, PIECE_VOCABULARY = vocabulary_of(BYTE_LEVEL), vocabulary_of(PIECES)
PIECE_ID = PIECES.get_vocab()
ID_OF_BYTE = [BYTE_LEVEL.convert_tokens_to_ids(bytes_to_unicode()[byte]) for byte in range(256)]
BYTE_LEVEL_IDS = st.lists(st.integers(0, len(BYTE_LEVEL) + 5), max_size=60)


def stream(vocabulary: Vocabulary, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(vocabulary, prompt)
    return [*(detokenizer.add(token) for token in ids), detokenizer.finish()]


@given(TEXTS)
def test_the_pieces_of_a_byte_level_text_add_up_to_it(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert "".join(stream(BYTE_VOCABULARY, ids)) == text


@given(BYTE_LEVEL_IDS)
def test_any_byte_level_ids_give_what_the_tokenizer_gives_for_the_whole(ids: list[int]) -> None:
    """Invalid bytes, special tokens and ids beyond the vocabulary included."""
    whole = BYTE_LEVEL.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(stream(BYTE_VOCABULARY, ids)) == whole


@given(TEXTS, TEXTS)
def test_the_pieces_of_a_sentencepiece_text_add_up_to_it(prompt: str, text: str) -> None:
    ids = PIECES.encode(prompt + "." + text).ids
    cut = len(PIECES.encode(prompt + ".").ids)
    whole = PIECES.decode(ids)
    assert "".join(stream(PIECE_VOCABULARY, ids[cut:], ids[:cut])) == whole.removeprefix(
        PIECES.decode(ids[:cut])
    )
    assert "".join(stream(PIECE_VOCABULARY, ids)) == whole


@given(TEXTS)
def test_no_piece_ends_within_a_character(text: str) -> None:
    kept = text.replace("\ufffd", "")
    for vocabulary, ids in (
        (BYTE_VOCABULARY, BYTE_LEVEL.encode(kept, add_special_tokens=False)),
        (PIECE_VOCABULARY, PIECES.encode(kept).ids),
    ):
        assert not any("\ufffd" in piece for piece in stream(vocabulary, ids))


@pytest.mark.parametrize(
    "vocabulary", [BYTE_VOCABULARY, PIECE_VOCABULARY], ids=["byte_level", "pieces"]
)
def test_an_emoji_comes_out_when_its_last_byte_is_there_and_not_before(
    vocabulary: Vocabulary,
) -> None:
    ids = {BYTE_VOCABULARY: ID_OF_BYTE, PIECE_VOCABULARY: range(2, 258)}[vocabulary]
    assert stream(vocabulary, [ids[byte] for byte in "🎉".encode()]) == ["", "", "", "🎉", ""]


@pytest.mark.parametrize(
    "vocabulary", [BYTE_VOCABULARY, PIECE_VOCABULARY], ids=["byte_level", "pieces"]
)
def test_an_unfinished_character_at_the_end_becomes_one_replacement_character(
    vocabulary: Vocabulary,
) -> None:
    ids = {BYTE_VOCABULARY: ID_OF_BYTE, PIECE_VOCABULARY: range(2, 258)}[vocabulary]
    assert stream(vocabulary, [ids[byte] for byte in b"\xe6\x97"]) == ["", "", "\ufffd"]
    assert stream(vocabulary, [ids[byte] for byte in "é".encode() + b"\xf0\x9f"])[-1] == "\ufffd"


def test_a_byte_run_cut_short_is_replaced_and_the_next_piece_follows() -> None:
    ids = [2 + 0xE6, 2 + 0x97, PIECE_ID["▁ab"]]
    assert stream(PIECE_VOCABULARY, ids) == ["", "", "\ufffd ab", ""]


def test_a_replacement_character_that_is_a_token_of_its_own_is_text() -> None:
    lone = PIECE_ID["\ufffd"]
    assert (
        "".join(stream(PIECE_VOCABULARY, [lone, lone, PIECE_ID["ab"], lone]))
        == "\ufffd\ufffdab\ufffd"
    )


@pytest.mark.parametrize(
    "vocabulary", [BYTE_VOCABULARY, PIECE_VOCABULARY], ids=["byte_level", "pieces"]
)
def test_endless_invalid_bytes_neither_stall_nor_fill_the_window(vocabulary: Vocabulary) -> None:
    bad = ID_OF_BYTE[0xFF] if vocabulary is BYTE_VOCABULARY else 2 + 0xFF
    detokenizer = Detokenizer(vocabulary)
    pieces = [detokenizer.add(bad) for _ in range(500)]
    assert pieces == ["\ufffd"] * 500
    assert len(detokenizer._window) <= WINDOW


def test_the_window_of_a_long_text_stays_short() -> None:
    detokenizer = Detokenizer(PIECE_VOCABULARY)
    ids = PIECES.encode("ab ab é. " * 200).ids
    longest = 0
    for token in ids:
        detokenizer.add(token)
        longest = max(longest, len(detokenizer._window))
    assert longest <= WINDOW


def test_the_first_token_keeps_the_space_that_separates_it_from_the_prompt() -> None:
    prompt, first = PIECES.encode("ab").ids, PIECE_ID["▁ab"]
    assert stream(PIECE_VOCABULARY, [first], prompt)[0] == " ab"
    assert stream(PIECE_VOCABULARY, [first])[0] == "ab"


def test_a_special_token_makes_no_text_and_costs_its_neighbours_nothing() -> None:
    end, ab = PIECE_ID["</s>"], PIECE_ID["▁ab"]
    assert "".join(stream(PIECE_VOCABULARY, [ab, *[end] * 50, ab])) == "ab ab"
    assert "".join(stream(BYTE_VOCABULARY, [BYTE_LEVEL.convert_tokens_to_ids(END)])) == ""


def test_a_character_begun_by_the_prompt_is_finished_by_the_first_tokens() -> None:
    start, rest = "日".encode()[:2], "日".encode()[2:]
    prompt = [ID_OF_BYTE[byte] for byte in b"ab" + start]
    assert "".join(stream(BYTE_VOCABULARY, [ID_OF_BYTE[byte] for byte in rest], prompt)) == "日"


def test_a_token_has_the_text_that_it_has_within_a_text() -> None:
    assert PIECE_VOCABULARY.token_text(PIECE_ID["</s>"]) == "</s>"
    ids = PIECES.encode("ab a ab").ids
    assert [PIECE_VOCABULARY.token_text(token) for token in ids] == [" ab", " a", " ab"]
    assert PIECE_VOCABULARY.token_text(PIECE_ID["ab"]) == "ab"
    assert PIECE_VOCABULARY.token_text(PIECE_ID["▁"]) == " "
    assert PIECE_VOCABULARY.first_text(PIECE_ID["▁ab"]) == "ab"
    assert BYTE_VOCABULARY.token_text(BYTE_LEVEL.encode(" a", add_special_tokens=False)[0]) == " a"


class SlowTokenizer:
    """A tokenizer of transformers without a Rust backend: characters by code point, -1 special."""

    all_special_ids = (0,)

    def __len__(self) -> int:
        return 0x110000

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


def test_a_tokenizer_without_a_backend_streams_too() -> None:
    vocabulary = vocabulary_of(SlowTokenizer())
    assert stream(vocabulary, [0, ord("h"), ord("é"), 0, ord("日")]) == ["", "h", "é", "", "日", ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES], ids=["bytes", "pieces"])
def test_a_special_token_makes_text_only_where_it_is_shown(tokenizer: Any) -> None:
    vocabulary = vocabulary_of(tokenizer)
    mark = min(vocabulary.special)
    text = vocabulary.token_text(mark)
    assert text

    def written(shown: frozenset[int]) -> str:
        detokenizer = Detokenizer(vocabulary, (), shown)
        return detokenizer.add(mark) + detokenizer.finish()

    assert (written(frozenset()), written(frozenset({mark}))) == ("", text)
