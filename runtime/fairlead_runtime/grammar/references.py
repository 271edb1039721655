"""Where the schemas of a JSON document lie, and what the references in it lead to.

llguidance resolves a pointer to any place of the document, also within keywords that it does not
know. Imports no library.
"""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_SCHEMAS = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_INDEX = re.compile(r"\+?[0-9]{1,18}")
_NOWHERE: Schema = {}  # the root of schemas whose references may begin at several places


def schemas_of(document: Schema) -> Iterator[Schema]:
    """The document and what keywords hold as schemas; not what references alone reach."""
    return (schema for schema, _ in _known(document, document))


def schema_roots(document: Schema) -> dict[int, Schema]:
    """By the ``id()`` of each object that is used as a schema, the schema that its references begin
    at; an empty one where that is not known. ``document``: no object lies at two places of it.
    """
    roots = {id(schema): root for schema, root in _known(document, document)}
    resources = [document, *(part for part in _objects(document) if _has_id(part))]
    outside = document if all(part is document for part in resources) else _NOWHERE
    waiting, references = [document], set[str]()
    while waiting:
        for schema, _ in _known(waiting.pop(), outside):
            roots.setdefault(id(schema), outside)
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in references:
                references.add(reference)
                waiting += [pointed(reference, resource) for resource in resources]
    return roots


def _known(schema: Any, root: Schema) -> Iterator[tuple[Schema, Schema]]:
    """The schema and those that keywords hold in it, each with its root."""
    if not isinstance(schema, dict):
        return
    if schema is not root and _has_id(schema):
        # ``id`` is a keyword of draft 4 alone, and a mark is no more than an anchor in some drafts.
        root = _NOWHERE if str(schema.get("$id", "#")).startswith("#") else schema
    yield schema, root
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            inner = [*value.values()]
        elif keyword in _LISTS and isinstance(value, list):
            inner = value
        else:
            inner = [value] if keyword in _SCHEMAS else []
        for part in inner:
            yield from _known(part, root)


def _objects(data: Any) -> Iterator[Schema]:
    if isinstance(data, dict):
        yield data
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _objects(value)


def _has_id(schema: Schema) -> bool:
    return "$id" in schema or isinstance(schema.get("id"), str)


def pointed(reference: str, root: Schema) -> Any:
    """What the pointer of a reference leads to below ``root``; None without one."""
    _, mark, pointer = reference.partition("#")
    if not mark or (pointer and not pointer.startswith("/")):
        return None
    part: Any = root
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(name)
        elif isinstance(part, list) and _INDEX.fullmatch(name) and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return part
