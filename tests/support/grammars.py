"""A tokenizer's facts for grammars, grammars that nobody may compile in the server, and a walk
through what a grammar allows.
"""

import json
import random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fairlead_runtime.grammar.compile import TokenizerFacts
from fairlead_runtime.grammar.guides import Guide
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from support import byte_tokenizer

# Two bytes that often follow each other, so that a text has several spellings, as with real models.
MERGES = [('"', "a"), ("Ġ", "Ġ"), ("a", "a"), ("aa", "aa"), ("{", '"'), ('"', ":"), ("Ċ", "Ġ")]
TOKENIZER = byte_tokenizer.byte_level(MERGES, max_length=4096)
EOS = TOKENIZER.convert_tokens_to_ids(byte_tokenizer.END)
VOCABULARY = len(TOKENIZER) + 5  # the logits are wider than the tokenizer


def facts() -> TokenizerFacts:
    found = TokenizerFacts.of(TOKENIZER, VOCABULARY, {EOS})
    assert found is not None
    return found


def _alternatives(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [{"properties": {"a": schema}}, {"items": schema}]}
    return schema


_CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
_CHAIN = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(3200))

# Nothing here may be compiled: too large, too slow, too deep, or it allows nothing.
HOSTILE: dict[str, dict[str, Any]] = {
    "cycle of references": {"json": _CYCLE},
    "reference to itself": {"json": {"$ref": "#"}},
    "reference to elsewhere": {"json": {"$ref": "http://127.0.0.1/schema.json"}},
    "contradiction": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "unknown keyword": {"json": {"type": "array", "uniqueItems": True}},
    "unknown type": {"json": {"type": "banana"}},
    "product of alternatives": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}{j}": {"type": "integer"}}} for j in range(5)]}
                for i in range(12)
            ]
        }
    },
    "counts of counts": {"regex": "(((a{1000}){1000}){1000}){1000}"},
    "optional counts of counts": {"regex": "(((a{0,1000}){0,1000}){0,1000}){0,1000}"},
    "back reference": {"regex": r"(a)\1"},
    "look-ahead": {"regex": "(?=a)b"},
    "open bracket": {"regex": "(((["},
    "endless recursion": {"grammar": "start: start"},
    "rules of counts": {"grammar": 'start: (((("a"){1,1000}){1,1000}){1,1000}){1,1000}'},
    "deep parentheses": {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    "deep GBNF": {"grammar": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000},
    "rule that is missing": {"grammar": "start: other"},
    "chain of rules": {"grammar": f'start: r0\n{_CHAIN}\nr3200: "c"'},
    "not a grammar": {"grammar": "\x00"},
}

# Its automaton doubles with every "a": it can be compiled, and exceeds a limit while it runs.
EXPONENTIAL = {"regex": "(a|b)*a(a|b){40}"}

# Large, and fine.
LARGE: dict[str, dict[str, Any]] = {
    "10,000 choices": {"choice": [str(number) for number in range(10_000)]},
    "enum of 5,000": {"json": {"enum": [f"value {i}" for i in range(5000)]}},
    "giant maxItems": {"json": {"items": {"type": "integer"}, "maxItems": 10**9}},
    "giant minItems": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
    "giant maxLength": {"json": {"type": "string", "maxLength": 10**9}},
    "giant minLength": {"json": {"type": "string", "minLength": 10**6}},
    "nested alternatives": {"json": _alternatives(4)},
    "recursion": {"json": {"type": "array", "items": {"$ref": "#"}}},
    "nested plus": {"regex": "((a+)+)+b"},
    "any object": {"json_object": True},
    "GBNF": {"grammar": 'root ::= "a" root | "b"'},
}


def sequence(params: SamplingParams | None = None, max_tokens: int = 10**6) -> Sequence:
    request = Request("r", (1,), params or SamplingParams(), max_tokens=max_tokens)
    return Sequence(0, request, 0, [1])


def allowed(mask: np.ndarray[Any, np.dtype[Any]]) -> list[int]:
    """The ids of a mask's bits."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(number) for number in np.flatnonzero(bits)]


def generate(
    guide: Guide, of: Sequence, choose: random.Random, tokens: int, vocabulary: Any = TOKENIZER
) -> str | None:
    """A random output that the guide allows; None where ``tokens`` do not suffice. It ends as soon
    as it may, in one of three cases. ``vocabulary``: a tokenizer of transformers.
    """
    end = vocabulary.eos_token_id
    for _ in range(tokens):
        ids = allowed(guide.mask(of))
        assert ids, "nothing is allowed"
        if ids == [end] or (end in ids and choose.random() < 0.3):
            return str(vocabulary.decode(of.tokens[of.prompt_len :]))
        of.tokens.append(choose.choice([number for number in ids if number != end]))
    return None


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """JSON schemas of finite values with the keywords that are supported."""
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 60))
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        st.lists(_VALUES, min_size=1, max_size=4, unique_by=json.dumps).map(
            lambda values: {"enum": values}
        ),
        _VALUES.map(lambda value: {"const": value}),
        st.tuples(st.integers(0, 3), st.integers(0, 4)).map(
            lambda n: {"type": "string", "minLength": n[0], "maxLength": n[0] + n[1]}
        ),
        st.sampled_from(["[a-f]{1,3}", "^x[0-9]{2}$", "(é|ß){2}"]).map(
            lambda pattern: {"type": "string", "pattern": f"^({pattern.strip('^$')})$"}
        ),
        st.sampled_from(["date", "uuid"]).map(lambda name: {"type": "string", "format": name}),
    )
    return st.recursive(leaves, _compound, max_leaves=8)


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.text(alphabet='ab"\\é\n😀', max_size=4)
)


def _compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.text(alphabet="abé_ ", min_size=1, max_size=4)
    objects = st.dictionaries(names, st.tuples(inner, st.booleans()), max_size=4).map(
        lambda properties: {
            "type": "object",
            "properties": {name: schema for name, (schema, _) in properties.items()},
            "required": [name for name, (_, required) in properties.items() if required],
            "additionalProperties": False,
        }
    )
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda a: {"type": "array", "items": a[0], "minItems": a[1], "maxItems": a[1] + a[2]}
    )
    unions = st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    return st.one_of(objects, arrays, unions)
