"""Calls of tools as people ask for them, with their schemas and right answers: those of the
Berkeley Function Calling Leaderboard, from a package of PyPI, fetched by name when a test asks for
them, checked by SHA-256, and kept.

They are no dependency of the product and lie in no repository of ours.
"""

import ast
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from support.real_weights import FOLDER, install
from support.warm import make_once

PACKAGE = "bfcl-eval==2026.3.23"  # Apache-2.0
# Of the names and contents of all files that are kept, in the order of their names.
SHA256 = "881b80e795a5bed1cd0def4c3c8327f7d325a98ce00d8234992ae4b8aa27f2f8"
SINGLE = tuple(
    f"BFCL_v4_{name}.json"
    for name in (
        *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel"),
        *("parallel_multiple", "live_simple", "live_multiple", "live_parallel"),
        "live_parallel_multiple",
    )
)
DIALOGUES = "BFCL_v4_multi_turn_base.json"
# The files of the tools that a dialogue's "involved_classes" name.
CLASSES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
# The leaderboard's names of types, which are those of three languages, as JSON Schema has them. A
# type that stands for any value is left out.
TYPES = {
    **dict.fromkeys(("dict", "hashmap"), "object"),
    **dict.fromkeys(("array", "arraylist", "tuple"), "array"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("integer", "long"), "integer"),
    **dict.fromkeys(("string", "char"), "string"),
    "boolean": "boolean",
}


NOTHING = ("", None)


class Call(NamedTuple):
    """``arguments``: in the order of the schema."""

    name: str
    arguments: dict[str, Any]


class Turn(NamedTuple):
    """``messages``: what was said, as clients send it; ``calls``: what the model should call."""

    messages: list[dict[str, Any]]
    calls: list[Call]


class Case(NamedTuple):
    """``tools``: as clients send them."""

    id: str
    tools: list[dict[str, Any]]
    turns: list[Turn]

    def parameters(self) -> dict[str, dict[str, Any]]:
        """The schema of each tool's arguments, by its name."""
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function["parameters"] for function in functions}


def cases() -> list[Case]:
    """Skips the test where the package cannot be fetched, and says so."""
    folder = _folder()
    return [*_single(folder), *_dialogues(folder)]


def _folder() -> Path:
    place = FOLDER / f"bfcl-{SHA256[:12]}"
    make_once(place, partial(_fetch, place))
    return place


def _fetch(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        install(Path(temporary, "packages"), PACKAGE)
        data, kept = Path(temporary, "packages/bfcl_eval/data"), Path(temporary, "kept")
        tools = [f"multi_turn_func_doc/{name}.json" for name in CLASSES.values()]
        questions = [*SINGLE, DIALOGUES]
        answers = [f"possible_answer/{name}" for name in questions]
        whole = hashlib.sha256()
        for name in sorted([*questions, *answers, *tools]):
            content = (data / name).read_bytes()
            whole.update(name.encode() + content)
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            (kept / name).write_bytes(content)
        assert whole.hexdigest() == SHA256, f"{PACKAGE} holds others: {whole.hexdigest()}"
        kept.rename(place)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _single(folder: Path) -> Iterator[Case]:
    """Questions that are answered with calls at once."""
    for name in SINGLE:
        answers = {row["id"]: row for row in _lines(folder / "possible_answer" / name)}
        for row in _lines(folder / name):
            tools = [_tool(function) for function in row["function"]]
            case = Case(row["id"], tools, [])
            calls = []
            for answer in answers[row["id"]]["ground_truth"]:
                ((called, options),) = answer.items()
                given = _fields(options)
                calls.append(_ordered(case, called, given))
            case.turns.append(Turn(row["question"][0], calls))
            yield case


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The first right value of each field; an empty text or None stands for a field that is left
    out.
    """
    chosen = {key: _first(few) if isinstance(few, list) else few for key, few in options.items()}
    return {key: _value(value) for key, value in chosen.items() if value not in NOTHING}


def _first(options: list[Any]) -> Any:
    return next((option for option in options if option not in NOTHING), None)


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(each) for each in value]
    return _fields(value) if isinstance(value, dict) else value


def _dialogues(folder: Path) -> Iterator[Case]:
    """Conversations of several turns, whose calls are written as Python's."""
    answers = {row["id"]: row for row in _lines(folder / "possible_answer" / DIALOGUES)}
    for row in _lines(folder / DIALOGUES):
        documents = [
            _lines(folder / "multi_turn_func_doc" / f"{CLASSES[each]}.json")
            for each in row["involved_classes"]
        ]
        case = Case(row["id"], [_tool(one) for document in documents for one in document], [])
        for messages, written in zip(
            row["question"], answers[row["id"]]["ground_truth"], strict=True
        ):
            case.turns.append(Turn(messages, [_python(case, call) for call in written]))
        yield case


def _python(case: Case, written: str) -> Call:
    call: Any = ast.parse(written, mode="eval").body
    name = call.func.id
    places = list(case.parameters()[name]["properties"])
    given = dict(zip(places, map(ast.literal_eval, call.args), strict=False))
    given |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return _ordered(case, name, given)


def _ordered(case: Case, name: str, given: Mapping[str, Any]) -> Call:
    return Call(name, _in_order(case.parameters()[name], given))


def _in_order(schema: Mapping[str, Any], value: Any) -> Any:
    """Objects with their keys in the order of the schema: a grammar lets no other through."""
    if isinstance(value, list):
        return [_in_order(schema.get("items", {}), each) for each in value]
    if not isinstance(value, Mapping):
        return value
    fields = schema.get("properties", {})
    keys = [*(key for key in fields if key in value), *(key for key in value if key not in fields)]
    return {key: _in_order(fields.get(key, {}), value[key]) for key in keys}


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        "name": function["name"],
        "description": function["description"],
        "parameters": _schema(function["parameters"]),
    }
    return {"type": "function", "function": fields}


def _schema(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The same in JSON Schema; an object has no other fields than those it states."""
    schema = {key: value for key, value in stated.items() if key not in ("type", "optional")}
    kind = TYPES.get(str(stated.get("type", "")).lower())
    if kind:
        schema = {"type": kind, **schema}
    if "properties" in stated:
        schema["properties"] = {key: _schema(value) for key, value in stated["properties"].items()}
        schema["additionalProperties"] = False
    if "items" in stated:
        schema["items"] = _schema(stated["items"])
    return schema
