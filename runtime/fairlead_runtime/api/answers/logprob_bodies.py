"""Log-probabilities in OpenAI's two shapes, with the bytes of single tokens, which need not be
whole characters.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fairlead_runtime.request.logprobs import Logprob

FLOOR = -9999.0  # stands for minus infinity, which JSON does not have
PIECE_TOKENS = 32  # whose log-probabilities are encoded at once, in a few milliseconds

# Ids that stand for the same bytes in every context; the bytes may be a part of a character.
TokenBytes = Mapping[int, bytes]


def chat_content(
    token_ids: Iterable[int],
    logprobs: Iterable[Mapping[int, Logprob]],
    top: int,
    token_bytes: TokenBytes,
    *,
    by_id: bool = False,
) -> list[dict[str, Any]]:
    """One entry per token: its text, or with ``by_id`` vLLM's spelling of its id, log-probability
    and bytes, and the ``top`` likeliest tokens.
    """
    content = []
    for token, entries in zip(token_ids, logprobs, strict=True):
        likeliest = [
            _chat_entry(candidate, entries[candidate], token_bytes, by_id=by_id)
            for candidate in _best(entries, top)
        ]
        content.append(
            {
                **_chat_entry(token, entries[token], token_bytes, by_id=by_id),
                "top_logprobs": likeliest,
            }
        )
    return content


def completion_logprobs(
    token_ids: Iterable[int],
    logprobs: Iterable[Mapping[int, Logprob] | None],
    top: int,
    token_bytes: TokenBytes,
    offsets: Iterable[int],
    first: str = "",
    *,
    by_id: bool = False,
) -> dict[str, Any]:
    """Four parallel lists. ``offsets``: where each token begins in the choice's text. A prompt's
    first token has None in place of log-probabilities, and ``first`` is its text. ``by_id``: as in
    ``chat_content``.
    """
    shape: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token, entries, offset in zip(token_ids, logprobs, offsets, strict=True):
        shape["text_offset"].append(offset)
        if entries is None:
            entry = Logprob(0.0, None, first)
            shape["tokens"].append(_name(token, entry, token_bytes, by_id=by_id))
            shape["token_logprobs"].append(None)
            shape["top_logprobs"].append(None)
            continue
        shape["tokens"].append(_name(token, entries[token], token_bytes, by_id=by_id))
        shape["token_logprobs"].append(_value(entries[token]))
        shape["top_logprobs"].append(_likeliest(token, entries, top, token_bytes, by_id=by_id))
    return shape


def _likeliest(
    token: int, entries: Mapping[int, Logprob], top: int, token_bytes: TokenBytes, *, by_id: bool
) -> dict[str, float]:
    """Log-probabilities of the ``top`` likeliest by name. As OpenAI does, list the chosen ``token``
    even when it is not among them. Of two tokens with one text the likelier has it as its name, but
    the chosen one always has.
    """
    chosen_name = _name(token, entries[token], token_bytes, by_id=by_id)
    named: dict[str, float] = {}
    for candidate in _best(entries, top):
        entry = entries[candidate]
        for name in _names(candidate, entry, token_bytes, by_id=by_id):
            if name not in named and (name != chosen_name or candidate == token):
                named[name] = _value(entry)
                break
    return {**named, chosen_name: _value(entries[token])}


def token_piece(
    token: int, entries: Mapping[int, Logprob] | None, token_bytes: TokenBytes, first: str = ""
) -> bytes:
    """The bytes of a token; ``first`` is the text of one without log-probabilities."""
    entry = Logprob(0.0, None, first) if entries is None else entries[token]
    return _bytes(token, entry, token_bytes)


def _chat_entry(
    token: int, entry: Logprob, token_bytes: TokenBytes, *, by_id: bool
) -> dict[str, Any]:
    text = _id_name(token) if by_id else entry.decoded_token or ""
    return {
        "token": text,
        "logprob": _value(entry),
        "bytes": list(_bytes(token, entry, token_bytes)),
    }


def _best(entries: Mapping[int, Logprob], top: int) -> list[int]:
    """At most ``top`` tokens: equal ones share a rank."""
    ranked = sorted(entries, key=lambda token: entries[token].rank or 0)
    return [token for token in ranked if (entries[token].rank or 0) <= top][:top]


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def _name(token: int, entry: Logprob, token_bytes: TokenBytes, *, by_id: bool) -> str:
    return next(_names(token, entry, token_bytes, by_id=by_id))


def _names(token: int, entry: Logprob, token_bytes: TokenBytes, *, by_id: bool) -> Iterator[str]:
    """The token's text, unless its bytes are not text, then OpenAI's spelling of its bytes, and at
    last vLLM's of its id, which no other token has; that alone ``by_id``.
    """
    if by_id:
        yield _id_name(token)
        return
    text = entry.decoded_token or ""
    raw = _bytes(token, entry, token_bytes)
    if raw == text.encode():
        yield text
    yield "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    yield _id_name(token)


def _bytes(token: int, entry: Logprob, token_bytes: TokenBytes) -> bytes:
    return token_bytes.get(token) or (entry.decoded_token or "").encode()


def _value(entry: Logprob) -> float:
    return max(entry.logprob, FLOOR)
