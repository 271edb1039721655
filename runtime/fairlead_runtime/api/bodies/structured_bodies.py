"""The body's fields for structured output: OpenAI's ``response_format``, vLLM's
``structured_outputs`` and its older ``guided_*`` names.

Owns their shapes and the names under which errors mention them. SamplingParams owns the bounds.
"""

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
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredBody(StrictBody):
    """Part of both routes' bodies. At most one of the fields may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


def structured_outputs(body: StructuredBody) -> tuple[Mapping[str, Any] | None, dict[str, str]]:
    """The value for SamplingParams, and the client's names of its parts. Raises ApiError 400."""
    constraints = {
        name: value
        for name, value in {
            "response_format": _of_format(body.response_format),
            PARAM: body.structured_outputs or None,
            "guided_json": _only("json", body.guided_json),
            "guided_regex": _only("regex", body.guided_regex),
            "guided_choice": _only("choice", body.guided_choice),
            "guided_grammar": _only("grammar", body.guided_grammar),
        }.items()
        if value is not None
    }
    if not constraints:
        return None, {}
    name, *conflicts = constraints
    if conflicts:
        raise invalid(conflicts[0], f"cannot be combined with {name}; send one of them")
    if name == PARAM:
        return _of_kinds(constraints[name]), {}
    params = [PARAM, *(f"{PARAM}.{kind}" for kind in KINDS)]
    sent = "response_format.json_schema.schema" if "json" in constraints[name] else name
    return constraints[name], dict.fromkeys(params, sent if name == "response_format" else name)


def _of_kinds(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The value; its other fields are the server's own."""
    for field in value:
        if field not in KINDS:
            raise invalid(f"{PARAM}.{field[:MAX_NAME]}", "is not supported: leave it out")
    return value


def _of_format(form: ResponseFormat | None) -> Mapping[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema is None:
        raise invalid("response_format.json_schema", "is missing", "missing_required_parameter")
    return {"json": form.json_schema.definition}


def _only(kind: str, value: Any) -> Mapping[str, Any] | None:
    return None if value is None else {kind: value}
