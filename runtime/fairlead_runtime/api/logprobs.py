"""Log-probabilities in the two shapes OpenAI has for them.

Owns the shapes and the bytes of single tokens, which need not be whole characters. Computes no probability.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from fairlead_runtime.logprobs import Logprob

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(1)
def _byte_of() -> dict[str, int]:
    """The byte each printable stand-in of byte-level BPE means (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(byte): byte for byte in plain}
    for place, byte in enumerate(byte for byte in range(256) if byte not in set(plain)):
        table[chr(256 + place)] = byte
    return table


class TokenBytes:
    """The exact bytes of one token, by the tokenizer's own piece: a token may be a part of a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))

    def of(self, token: int, text: str) -> bytes:
        """``text`` is the token decoded alone: its bytes unless it is a part of a character."""
        if "�" not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if self._byte_level:
            table = _byte_of()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
        if single := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(single[1], 16)])
        return text.encode()


def chat_content(
    token_ids: Iterable[int], found: Iterable[Mapping[int, Logprob]], top: int, tokens: TokenBytes
) -> list[dict[str, Any]]:
    """One entry per token: its text, log-probability and bytes, and the ``top`` likeliest beside it."""
    content = []
    for token, entries in zip(token_ids, found, strict=True):
        likeliest = [_chat_entry(other, entries[other], tokens) for other in _best(entries, top)]
        content.append({**_chat_entry(token, entries[token], tokens), "top_logprobs": likeliest})
    return content


def completion_logprobs(
    token_ids: Iterable[int],
    found: Iterable[Mapping[int, Logprob]],
    top: int,
    tokens: TokenBytes,
    offset: int = 0,
) -> dict[str, Any]:
    """Four parallel lists; ``offset`` is the character in the choice's text at which the first token begins."""
    shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entries in zip(token_ids, found, strict=True):
        text = _name(token, entries[token], tokens)
        likeliest = {
            _name(other, entries[other], tokens): _value(entries[other]) for other in _best(entries, top)
        }
        shape["tokens"].append(text)
        shape["token_logprobs"].append(_value(entries[token]))
        # As OpenAI does, the chosen token is listed even when it is not among the likeliest.
        shape["top_logprobs"].append({**likeliest, text: _value(entries[token])})
        shape["text_offset"].append(offset)
        offset += characters(token, entries[token], tokens)
    return shape


def characters(token: int, entry: Logprob, tokens: TokenBytes) -> int:
    """How many characters begin within the token."""
    return sum(byte & 0xC0 != 0x80 for byte in tokens.of(token, entry.decoded_token or ""))


def _chat_entry(token: int, entry: Logprob, tokens: TokenBytes) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {"token": text, "logprob": _value(entry), "bytes": list(tokens.of(token, text))}


def _best(entries: Mapping[int, Logprob], top: int) -> list[int]:
    ranked = sorted(entries, key=lambda token: entries[token].rank or 0)
    return [token for token in ranked if (entries[token].rank or 0) <= top]


def _name(token: int, entry: Logprob, tokens: TokenBytes) -> str:
    """The token's text, or OpenAI's spelling of bytes that are no text, so that no two tokens are one key."""
    text = entry.decoded_token or ""
    raw = tokens.of(token, text)
    return text if raw == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _value(entry: Logprob) -> float:
    return max(entry.logprob, FLOOR)
