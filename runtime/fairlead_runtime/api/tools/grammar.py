"""The JSON schema of calls that a request forces: of the named tool's arguments, or of a list of
calls of any of its tools. The parameters of a tool hold with or without ``strict``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any]

_IDS = ("$id", "id")  # the latter in draft 4


def arguments_schema(parameters: Mapping[str, Any] | None) -> Schema:
    """Without ``parameters`` a tool has none, as OpenAI says."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**parameters, "type": "object"}


def calls_schema(
    tools: Sequence[tuple[str, Mapping[str, Any] | None]], *, parallel: bool
) -> Schema:
    """The schema of a list of calls: ``[{"name": "f", "parameters": {…}}]``. ``tools``: names and
    parameters.

    Each tool's schema is a resource of its own, into which its references point as they are, by
    path or by anchor.
    """
    places = [f"tool{number}" for number in range(len(tools))]
    definitions = {
        place: {**arguments_schema(parameters), **dict.fromkeys(_IDS, f"urn:fairlead:{place}")}
        for place, (_, parameters) in zip(places, tools, strict=True)
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for place, (name, _) in zip(places, tools, strict=True)
    ]
    limit = {} if parallel else {"maxItems": 1}
    items = {"anyOf": calls}
    return {"type": "array", "minItems": 1, **limit, "items": items, "$defs": definitions}
