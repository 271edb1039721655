"""Token ids to text, one token at a time and never a piece of a character.

Owns what of a choice's text is settled and what may still change with the next token. Special
tokens make no text. Knows no stop text and no request. The pieces concatenate to the text of the
whole, with one documented exception: where a sentencepiece vocabulary spells out bytes and a run of
them is invalid, transformers replaces the whole run, while here, as a stream cannot take back what
it said, only the invalid bytes become U+FFFD.
"""

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# A character spans at most 4 bytes, thus 4 tokens: what lies further back is settled. A decoder
# that looks at its neighbours (a space that is dropped at the start of a text) needs one token
# more.
CONTEXT = 6
WINDOW = 4 * CONTEXT

_utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """What decoding needs of a tokenizer; made once per model by ``vocabulary_of``.

    ``decode`` turns ids into text by the tokenizer's own rules. ``special`` ids make no text.
    ``spelled`` are ids that stand for fixed bytes, wherever they are: with ``bytewise`` every id of
    the vocabulary, else at most the 256 of byte fallback, ``<0xNN>``.
    """

    decode: Callable[[Sequence[int]], str]
    special: frozenset[int]
    spelled: Mapping[int, bytes]
    bytewise: bool
    token_text: Callable[
        [int], str
    ]  # one token by itself, special ones too: what log-probabilities show


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """From a ``tokenizers.Tokenizer`` or any tokenizer of transformers."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        return _slow_vocabulary(tokenizer)
    added = backend.get_added_tokens_decoder()
    special = frozenset(number for number, token in added.items() if token.special)

    def decode(ids: Sequence[int]) -> str:
        return backend.decode(list(ids), skip_special_tokens=False)

    @lru_cache(maxsize=4096)
    def token_text(token: int) -> str:
        return decode([token])

    spelled, bytewise = _spelled(backend)
    return Vocabulary(decode, special, spelled, bytewise, token_text)


def _slow_vocabulary(tokenizer: Any) -> Vocabulary:
    """For tokenizers of transformers that have no Rust backend."""

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    return Vocabulary(
        decode, frozenset(tokenizer.all_special_ids), {}, False, lambda token: decode([token])
    )


def _spelled(backend: Tokenizer) -> tuple[dict[int, bytes], bool]:
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
    """The types of the tokenizer's decoder, or of its parts."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's stand-ins: printable Latin-1 as itself, the other bytes from U+0100 on
    (GPT-2's table).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


def _bytes_of(piece: str, alphabet: Mapping[str, int]) -> bytes:
    """A piece's bytes; one with a character outside the alphabet (an added token) stands for
    itself.
    """
    try:
        return bytes([alphabet[character] for character in piece])
    except KeyError:
        return piece.encode()


class Detokenizer:
    """The text of one choice. ``prompt`` gives its first token the neighbours it has in the whole."""

    __slots__ = ("_bytes", "_given", "_held", "_in_bytes", "_vocabulary", "_window")

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._bytes = _utf8(errors="replace")
        self._in_bytes = False
        # The last tokens that made text, how many characters of their text have been handed out,
        # and whether the one left over is a U+FFFD that waits for the next token.
        self._window = [t for t in prompt[-WINDOW:] if t not in vocabulary.special][-CONTEXT:]
        self._given = 0
        self._held = False
        if vocabulary.bytewise:
            self._bytes.decode(b"".join(vocabulary.spelled.get(t, b"") for t in self._window))
        else:
            self._rebase()

    def add(self, token: int) -> str:
        """The text that is settled now and was not before; often empty in the middle of a
        character.
        """
        if token in self._vocabulary.special:
            return ""
        spelled = self._vocabulary.spelled.get(token)
        if self._vocabulary.bytewise:  # an id beyond the vocabulary makes no text
            return self._bytes.decode(spelled or b"")
        self._window.append(token)
        if spelled is not None:
            held, self._held = REPLACEMENT if self._held else "", False
            self._in_bytes = True
            del self._window[:-CONTEXT]
            return held + self._bytes.decode(spelled)
        if self._in_bytes:
            return self._leave_bytes() + self._settled()
        return self._settled()

    def finish(self) -> str:
        """What was held back; the bytes of an unfinished character become U+FFFD."""
        held = REPLACEMENT if self._held else ""
        return held + self._bytes.decode(b"", final=True)

    def _leave_bytes(self) -> str:
        """A token with text of its own follows a run of bytes: the run is over, complete or not."""
        held = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        self._in_bytes = False
        self._given = len(self._vocabulary.decode(self._window[:-1]))
        return held

    def _settled(self) -> str:
        """All but a last U+FFFD, which may become a character; the one before it cannot change any
        more.
        """
        text = self._vocabulary.decode(self._window)
        self._held = text.endswith(REPLACEMENT)
        end = len(text) - self._held
        piece = text[self._given : end]
        self._given = max(self._given, end)
        if len(self._window) > WINDOW:
            del self._window[:-CONTEXT]
            self._rebase()
        return piece

    def _rebase(self) -> None:
        text = self._vocabulary.decode(self._window) if self._window else ""
        self._held = text.endswith(REPLACEMENT)
        self._given = len(text) - self._held
