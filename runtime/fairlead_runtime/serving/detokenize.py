"""Token ids to text, one token at a time, without splitting a character.

Owns which text of a choice is final and which may still change with the next token. Special tokens
make no text. Knows no stop text and no request. The pieces concatenate to the decoded whole, with
one exception: for an invalid run of a sentencepiece vocabulary's byte tokens, transformers replaces
the whole run; a stream cannot take text back, so here only the invalid bytes become U+FFFD.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# A character spans at most 4 bytes and so 4 tokens: text further back is final. A decoder that
# looks at neighbours (one that drops the space at the start of a text) needs one token more.
CONTEXT = 6
WINDOW = 4 * CONTEXT

_utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The parts of a tokenizer that decoding needs; made once per model by ``vocabulary_of``.

    ``decode`` turns ids into text by the tokenizer's own rules. ``special`` ids make no text.
    ``token_bytes`` has the ids that stand for the same bytes in every context: with ``byte_level``
    all ids of the vocabulary, else at most the 256 of byte fallback, ``<0xNN>``. ``token_text`` is
    the text of one token within a text, special or not, as log-probabilities show it.
    """

    decode: Callable[[Sequence[int]], str]
    special: frozenset[int]
    token_bytes: Mapping[int, bytes]
    byte_level: bool
    token_text: Callable[[int], str]

    def first_text(self, token: int) -> str:
        """The text of a token that begins a text: some decoders drop a space there."""
        return self.decode([token])


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Make the vocabulary of a ``tokenizers.Tokenizer`` or any tokenizer of transformers."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        return _slow_vocabulary(tokenizer)
    added = backend.get_added_tokens_decoder()
    special = frozenset(number for number, token in added.items() if token.special)

    def decode(ids: Sequence[int]) -> str:
        return backend.decode(list(ids), skip_special_tokens=False)

    token_bytes, byte_level = _token_bytes(backend)
    ids = range(backend.get_vocab_size())
    ordinary = (token for token in ids if token not in special and token not in token_bytes)
    token_text = lru_cache(maxsize=4096)(_text_within(decode, ordinary))
    return Vocabulary(decode, special, token_bytes, byte_level, token_text)


def _text_within(
    decode: Callable[[Sequence[int]], str], ordinary: Iterable[int]
) -> Callable[[int], str]:
    """The text of a token within a text. A token alone begins one, where some decoders drop a
    space. ``ordinary``: ids of which one serves as the token before.
    """
    before = next((token for token in ordinary if decode([token]).strip()), None)
    if before is None:
        return lambda token: decode([token])
    start = decode([before])

    def text(token: int) -> str:
        both = decode([before, token])
        return both.removeprefix(start) if both.startswith(start) else decode([token])

    return text


def _slow_vocabulary(tokenizer: Any) -> Vocabulary:
    """The vocabulary for tokenizers of transformers that have no Rust backend."""

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    special = frozenset(tokenizer.all_special_ids)
    ordinary = (token for token in range(len(tokenizer)) if token not in special)
    return Vocabulary(decode, special, {}, False, _text_within(decode, ordinary))


def _token_bytes(backend: Tokenizer) -> tuple[dict[int, bytes], bool]:
    kinds = _decoder_kinds(backend)
    vocab = backend.get_vocab(with_added_tokens=True)
    if kinds == ["ByteLevel"]:
        alphabet = _byte_alphabet()
        return {number: _bytes_of(piece, alphabet) for piece, number in vocab.items()}, True
    if "ByteFallback" in kinds:
        spelling = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        return {vocab[name]: byte for name, byte in spelling.items() if name in vocab}, False
    return {}, False


def _decoder_kinds(backend: Tokenizer) -> list[str]:
    """The types of the tokenizer's decoders."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [decoder["type"] for decoder in state.get("decoders", [state])]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters for bytes: printable Latin-1 for itself, U+0100 and up for the
    other bytes (GPT-2's table).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(unprintable)
    }


def _bytes_of(piece: str, alphabet: Mapping[str, int]) -> bytes:
    """A piece's bytes; a piece with a character outside the alphabet (an added token) is its own
    text.
    """
    try:
        return bytes([alphabet[character] for character in piece])
    except KeyError:
        return piece.encode()


class Detokenizer:
    """The text of one choice. ``prompt`` gives the first token its neighbours on the left.
    ``visible_tokens``: special tokens that make text here.
    """

    __slots__ = (
        "_bytes",
        "_final_length",
        "_in_bytes",
        "_replacement_pending",
        "_silent",
        "_vocabulary",
        "_window",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int] = (),
        visible_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self._vocabulary = vocabulary
        self._silent = vocabulary.special - visible_tokens if visible_tokens else vocabulary.special
        self._bytes = _utf8(errors="replace")
        self._in_bytes = False
        # The last tokens that made text, how many characters of their text were returned, and
        # whether a U+FFFD at its end still waits for the next token.
        self._window = [t for t in prompt[-WINDOW:] if t not in vocabulary.special][-CONTEXT:]
        self._final_length = 0
        self._replacement_pending = False
        if vocabulary.byte_level:
            self._bytes.decode(b"".join(vocabulary.token_bytes.get(t, b"") for t in self._window))
        else:
            self._rebase()

    def add(self, token: int) -> str:
        """The text that this token makes final; often empty in the middle of a character."""
        if token in self._silent:
            return ""
        token_bytes = self._vocabulary.token_bytes.get(token)
        if self._vocabulary.byte_level:  # an id beyond the vocabulary makes no text
            return self._bytes.decode(token_bytes or b"")
        self._window.append(token)
        if token_bytes is not None:
            replacement, self._replacement_pending = (
                REPLACEMENT if self._replacement_pending else "",
                False,
            )
            self._in_bytes = True
            del self._window[:-CONTEXT]
            return replacement + self._bytes.decode(token_bytes)
        if self._in_bytes:
            return self._leave_bytes() + self._settled()
        return self._settled()

    def finish(self) -> str:
        """The text held back until now; the bytes of an unfinished character become U+FFFD."""
        replacement = REPLACEMENT if self._replacement_pending else ""
        return replacement + self._bytes.decode(b"", final=True)

    def _leave_bytes(self) -> str:
        """End a run of byte tokens, complete or not, when a token with its own text follows."""
        text = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        self._in_bytes = False
        self._final_length = len(self._vocabulary.decode(self._window[:-1]))
        return text

    def _settled(self) -> str:
        """The new final text: all but a last U+FFFD, which may still become a character."""
        text = self._vocabulary.decode(self._window)
        self._replacement_pending = text.endswith(REPLACEMENT)
        end = len(text) - self._replacement_pending
        piece = text[self._final_length : end]
        self._final_length = max(self._final_length, end)
        if len(self._window) > WINDOW:
            del self._window[:-CONTEXT]
            self._rebase()
        return piece

    def _rebase(self) -> None:
        text = self._vocabulary.decode(self._window) if self._window else ""
        self._replacement_pending = text.endswith(REPLACEMENT)
        self._final_length = len(text) - self._replacement_pending
