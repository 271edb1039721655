"""The fields of a body that are about tools: their checks, and their meaning for parser and
template.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from fairlead_runtime.api.tools.formats import ToolUse
from fairlead_runtime.api.tools.grammar import arguments_schema, calls_schema
from fairlead_runtime.front.errors import invalid
from fairlead_runtime.front.strict_body import StrictBody
from fairlead_runtime.grammar.references import schemas_of

MAX_TOOLS = 128
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_ALL_TYPES = ", ".join(sorted(_TYPES))
ALLOWED = "allowed_tools"
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"  # OpenAI has 64; coding tools name those of MCP longer


class Function(StrictBody):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictBody):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as models were trained on it: without ``strict`` and without what is not set."""
        fields = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": fields}


class Tools(NamedTuple):
    """``for_template``: the tools that the model is told of. ``schema``: the JSON schema that the
    whole answer must match, where the request forces a call.
    """

    use: ToolUse
    for_template: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None


NO_TOOLS = Tools(ToolUse())


def tools_of(tools: list[Tool] | None, choice: Any, *, parallel: bool | None) -> Tools:
    """Raises ApiError 400. With ``tool_choice`` none the model is told of no tools, with
    ``allowed_tools`` of these.
    """
    for number, tool in enumerate(tools or ()):
        _check_types(f"tools.{number}.function.parameters", tool.function.parameters)
    names = [tool.function.name for tool in tools or ()]
    if len({*names}) != len(names):
        raise invalid("tools", "two tools have the same name; give each its own")
    if isinstance(choice, dict) and choice.get("type") == ALLOWED:
        choice, allowed = _allowed(choice)
        if not allowed <= {*names}:
            raise invalid("tool_choice", "allows a tool that is not among tools; send it there")
        tools = [tool for tool in tools or () if tool.function.name in allowed]
        names = [tool.function.name for tool in tools]
    forced = _forced(choice)
    if (forced is not None or choice == "required") and not names:
        raise invalid("tool_choice", "needs tools; send them or leave it out")
    if forced is not None and forced not in names:
        raise invalid("tool_choice", "names none of the tools; name one of them")
    if choice == "none" or not tools:
        return NO_TOOLS
    use = ToolUse(
        names=frozenset(names),
        forced=forced,
        required=choice == "required",
        parallel=parallel is not False,
    )
    return Tools(use, tuple(tool.for_template() for tool in tools), _schema(use, tools))


def _check_types(where: str, parameters: dict[str, Any] | None) -> None:
    """Raises ApiError 400 for a ``type`` that JSON Schema does not have, in any schema of a tool:
    where no grammar enforces it, only the model's text would show that.
    """
    for schema in schemas_of(parameters or {}):
        kinds = [] if schema.get("type") is None else schema["type"]
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if not (isinstance(kind, str) and kind in _TYPES):
                raise invalid(where, f"a type that does not exist; the types are {_ALL_TYPES}")


def _schema(use: ToolUse, tools: list[Tool]) -> dict[str, Any] | None:
    parameters = [(tool.function.name, tool.function.parameters) for tool in tools]
    if use.forced is not None:
        return arguments_schema(dict(parameters)[use.forced])
    return calls_schema(parameters, parallel=use.parallel) if use.required else None


def _allowed(choice: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    """The mode of OpenAI's choice of allowed tools, and their names."""
    allowed = choice.get(ALLOWED)
    allowed = allowed if isinstance(allowed, dict) else {}
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise invalid(
            "tool_choice", 'its allowed_tools must have a mode, "auto" or "required", and tools'
        )
    return mode, frozenset(_forced(tool) or "" for tool in tools)


def _forced(choice: Any) -> str | None:
    """The tool that ``tool_choice`` names."""
    if choice in (None, "none", "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise invalid(
            "tool_choice",
            'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} '
            'or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
        )
    return name
