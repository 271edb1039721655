"""The body's fields for structured output: OpenAI's ``response_format``, vLLM's
``structured_outputs`` and its older ``guided_*`` names.

Owns their shapes and the names under which errors mention them. SamplingParams owns the bounds.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.strict_body import MAX_NAME, StrictBody
from fairlead_runtime.request.structured import KINDS, PARAM


class JsonSchema(StrictBody):
    """``strict`` changes nothing: every schema is enforced. ``name`` is for the client."""

    name: str | None = Field(default=None, max_length=MAX_NAME)
    description: str | None = None
    strict: bool | None = None
    definition: dict[str, Any] = Field(alias="schema")


class ResponseFormat(StrictBody):
    """A schema may lie in ``json_schema`` (OpenAI's place), ``schema`` (llama.cpp's) or ``value``
    (TGI's, either itself or in an object like OpenAI's).
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    definition: dict[str, Any] | None = Field(default=None, alias="schema")
    value: dict[str, Any] | None = None

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Each schema by the client's name of it."""
        schemas = {
            "json_schema.schema": None if self.json_schema is None else self.json_schema.definition,
            "schema": self.definition,
            **_of_value(self.value),
        }
        return {
            f"response_format.{name}": schema
            for name, schema in schemas.items()
            if schema is not None
        }


class StructuredBody(StrictBody):
    """Part of both routes' bodies. At most one of the fields may ask for something; a constraint
    that is an empty text asks for nothing.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None


# The fields that say one constraint, and its kind: vLLM's older ones, SGLang's and llama.cpp's.
_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}


# OpenAI's fields around a schema.
_WRAPPER = {"name", "description", "strict", "schema"}


def structured_outputs(body: StructuredBody) -> tuple[Mapping[str, Any] | None, dict[str, str]]:
    """The value for SamplingParams, and the client's names of its parts. Raises ApiError 400."""
    constraints = {
        **_of_format(body.response_format),
        **({PARAM: body.structured_outputs} if body.structured_outputs else {}),
        **{
            name: {kind: value}
            for name, kind in _KINDS.items()
            if (value := getattr(body, name)) not in (None, "")
        },
    }
    if not constraints:
        return None, {}
    name, *conflicts = constraints
    if conflicts:
        raise invalid(conflicts[0], f"cannot be combined with {name}; send one of them")
    of_kinds = name == PARAM
    _refuse_wrapped(f"{PARAM}.json" if of_kinds else name, constraints[name].get("json"))
    if of_kinds:
        return _of_kinds(constraints[name]), {}
    return constraints[name], dict.fromkeys((PARAM, *(f"{PARAM}.{kind}" for kind in KINDS)), name)


def _of_value(value: dict[str, Any] | None) -> dict[str, dict[str, Any] | None]:
    """TGI's schema by the client's name of it."""
    if value is not None and _wrapped(value):
        return {"value.schema": value["schema"]}
    return {"value": value}


def _wrapped(schema: Mapping[str, Any]) -> bool:
    """Whether it is OpenAI's object around a schema. As a schema it would allow every value."""
    return isinstance(schema.get("schema"), Mapping) and schema.keys() <= _WRAPPER


def _refuse_wrapped(name: str, schema: Any) -> None:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return  # SamplingParams says what is wrong
    if isinstance(schema, Mapping) and _wrapped(schema):
        raise invalid(name, "is an object around a schema: send what lies in its field schema")


def _of_kinds(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The value; its other fields are the server's own."""
    for field in value:
        if field not in KINDS:
            raise invalid(f"{PARAM}.{field[:MAX_NAME]}", "is not supported: leave it out")
    return value


def _of_format(form: ResponseFormat | None) -> dict[str, Mapping[str, Any]]:
    """What the format asks for, by the client's name of it; a second schema is a conflict."""
    if form is None:
        return {}
    schemas = form.schemas
    if form.type == "text":
        if schemas:
            raise invalid(next(iter(schemas)), "needs the type json_schema or json_object")
        return {}
    if form.type == "json_object" and not any(schemas.values()):
        return {"response_format": {"json_object": True}}
    if not schemas:
        raise invalid("response_format.json_schema", "is missing", "missing_required_parameter")
    return {name: {"json": schema} for name, schema in schemas.items()}
