"""Log-probabilities in the two shapes OpenAI has for them.

Owns the shapes and the bytes of single tokens, which need not be whole characters. Computes no
probability.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fairlead_runtime.logprobs import Logprob

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say

# Ids whose bytes are fixed by the vocabulary, wherever they are: they may be a part of a character.
Spelled = Mapping[int, bytes]


def chat_content(
    token_ids: Iterable[int], found: Iterable[Mapping[int, Logprob]], top: int, spelled: Spelled
) -> list[dict[str, Any]]:
    """One entry per token: its text, log-probability and bytes, and the ``top`` likeliest beside
    it.
    """
    content = []
    for token, entries in zip(token_ids, found, strict=True):
        likeliest = [_chat_entry(other, entries[other], spelled) for other in _best(entries, top)]
        content.append({**_chat_entry(token, entries[token], spelled), "top_logprobs": likeliest})
    return content


def completion_logprobs(
    token_ids: Iterable[int],
    found: Iterable[Mapping[int, Logprob]],
    top: int,
    spelled: Spelled,
    offset: int = 0,
) -> dict[str, Any]:
    """Four parallel lists; ``offset`` is the character in the choice's text at which the first
    token begins.
    """
    shape: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token, entries in zip(token_ids, found, strict=True):
        text = _name(token, entries[token], spelled)
        likeliest = {
            _name(other, entries[other], spelled): _value(entries[other])
            for other in _best(entries, top)
        }
        shape["tokens"].append(text)
        shape["token_logprobs"].append(_value(entries[token]))
        # As OpenAI does, the chosen token is listed even when it is not among the likeliest.
        shape["top_logprobs"].append({**likeliest, text: _value(entries[token])})
        shape["text_offset"].append(offset)
        offset += characters(token, entries[token], spelled)
    return shape


def characters(token: int, entry: Logprob, spelled: Spelled) -> int:
    """How many characters begin within the token."""
    return sum(byte & 0xC0 != 0x80 for byte in _bytes(token, entry, spelled))


def _chat_entry(token: int, entry: Logprob, spelled: Spelled) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {"token": text, "logprob": _value(entry), "bytes": list(_bytes(token, entry, spelled))}


def _best(entries: Mapping[int, Logprob], top: int) -> list[int]:
    ranked = sorted(entries, key=lambda token: entries[token].rank or 0)
    return [token for token in ranked if (entries[token].rank or 0) <= top]


def _name(token: int, entry: Logprob, spelled: Spelled) -> str:
    """The token's text, or OpenAI's spelling of bytes that are no text, so that no two tokens are
    one key.
    """
    text = entry.decoded_token or ""
    raw = _bytes(token, entry, spelled)
    return text if raw == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes(token: int, entry: Logprob, spelled: Spelled) -> bytes:
    return spelled.get(token) or (entry.decoded_token or "").encode()


def _value(entry: Logprob) -> float:
    return max(entry.logprob, FLOOR)
