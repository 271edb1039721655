"""Tools in groups, as coding tools send those of agents and of MCP servers: a ``namespace`` with
functions in it. A model knows each as one function, by both names; its calls come back as two.

Searches of the web, which a model may use or not and coding tools always offer, are left out.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fairlead_runtime.api.bodies.tool_bodies import FUNCTION_NAME, MAX_TOOLS
from fairlead_runtime.front.errors import invalid

KIND = "namespace"  # the type of such a tool, and the field of a call
_BETWEEN = "__"
_NAME = re.compile(FUNCTION_NAME)
_SEARCH = re.compile(r"web_search(_preview)?(_\d{4}_\d{2}_\d{2})?")
Tool = Mapping[str, Any]


class Placed(NamedTuple):
    """A function, without its namespace, and the path of what the client sent."""

    path: str
    tool: Tool
    namespace: str | None = None

    @property
    def name(self) -> Any:
        """The one that a model knows; of any type, as the client sent it."""
        name = self.tool.get("name")
        return joined(self.namespace, name) if isinstance(name, str) else name


def joined(namespace: str | None, name: str) -> str:
    """The name by which a model knows a function."""
    return name if namespace is None else f"{namespace}{_BETWEEN}{name}"


def functions_of(tools: Sequence[Tool]) -> Iterator[Placed]:
    """The functions of the tools, in their order, each with the description of its namespace before
    its own. Raises ApiError 400 for any other tool but a search, and for more than MAX_TOOLS
    functions.
    """
    _count(tools)
    for place, tool in enumerate(tools):
        path = f"tools.{place}"
        if is_search(tool):
            continue
        if tool.get("type") != KIND:
            yield _function(path, tool)
            continue
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid(
                f"{path}.name", "must name the namespace: 1 to 128 letters, digits, _, . or -"
            )
        described = tool.get("description")
        if not isinstance(described, str | None):
            raise invalid(f"{path}.description", "must be text; leave it out")
        if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
            raise invalid(f"{path}.tools", "must be a list of functions")
        for number, each in enumerate(inner):
            placed = _function(f"{path}.tools.{number}", each)
            yield Placed(placed.path, _described(each, described), name)


def is_search(tool: Tool) -> bool:
    """Whether a tool is a search of the web, by any of the names that OpenAI's API has for it."""
    kind = tool.get("type")
    return isinstance(kind, str) and _SEARCH.fullmatch(kind) is not None


def searches_in(tools: Any) -> list[str]:
    """The searches among the tools, of any type yet, as the header shows what was ignored."""
    if not isinstance(tools, list):
        return []
    return [f"tools.{tool['type']}" for tool in tools if isinstance(tool, dict) and is_search(tool)]


def _count(tools: Sequence[Tool]) -> None:
    count = 0
    for place, tool in enumerate(tools):
        inner = tool.get("tools") if tool.get("type") == KIND else None
        count += len(inner) if isinstance(inner, list) else 1
        if count > MAX_TOOLS:
            path = f"tools.{place}.tools" if isinstance(inner, list) else "tools"
            raise invalid(path, f"more than {MAX_TOOLS} functions in all; send fewer")


def _described(tool: Tool, namespace: str | None) -> Tool:
    own = tool.get("description")
    if not namespace or not isinstance(own, str | None):
        return tool
    texts = [namespace, own] if own else [namespace]
    return {**tool, "description": "\n".join(texts)}


def _function(path: str, tool: Tool) -> Placed:
    if tool.get("type") != "function":
        raise invalid(
            f"{path}.type",
            'must be "function", or "namespace" for a group of them; no tool is built in',
        )
    if "name" not in tool and isinstance(tool.get("function"), dict):
        message = "is a chat's form: send name, description and parameters beside type"
        raise invalid(f"{path}.function", message)
    return Placed(path, tool)


def names_of(tools: Sequence[Tool]) -> dict[str, tuple[str, str]]:
    """Of valid tools, by the name that a model knows, the name and namespace of each function that
    is in one.
    """
    return {
        str(placed.name): (str(placed.tool["name"]), placed.namespace)
        for placed in functions_of(tools)
        if placed.namespace is not None
    }
