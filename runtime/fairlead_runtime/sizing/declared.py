"""Whether transformers' configuration class takes the values of a ``config.json``: their types, and
what all classes check.

Owns these rules, so that no plan promises a pod whose class refuses a setting from which no size
follows. ``families/field_types`` has what each class declares. Pure.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from fairlead_runtime.sizing.families.field_types import (
    ACTIVATIONS,
    LAYER_TYPES,
    MLP_LAYER_TYPES,
    ROWS,
    SERVED,
)

_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number with a decimal point",
    "str": "text",
    "dict": "an object",
    "list": "a list",
    "null": "null",
}
# The settings that name a function: a class looks it up when it is built.
_FUNCTIONS = (
    *("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"),
    *("mamba_hidden_act", "projector_hidden_act", "classifier_activation"),
)
# Numbers that classes declare with null, which their code does not read.
_NUMBERS = frozenset(
    (
        *("embedding_multiplier", "residual_multiplier", "lm_head_multiplier", "key_multiplier"),
        *("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier"),
        *("ssm_out_multiplier", "logits_scaling", "route_scale", "time_step_limit"),
        *("n_group", "topk_group"),
    )
)
_LENGTHS = {"ssm_multipliers": 5, "mlp_multipliers": 2, "time_step_limit": 2}
_FLOAT = "__float__"  # infinity, as transformers writes it


@cache
def _declared() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """By model_type and setting the types that its class declares."""
    table: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in SERVED.split()}
    for row in ROWS.strip().replace("\n  ", " ").splitlines():
        words, _, listed = row.partition(": ")
        field, types = words.split()
        names = listed.split()
        if names[0] == "-":
            names = [name for name in SERVED.split() if name not in names]
        for name in names:
            table[name][field] = tuple(types.split("|"))
    return table


def declares(kind: str, field: str) -> bool:
    """Whether the class of this model_type declares the setting: others take any value of it."""
    return field in _declared().get(kind, {})


def problem_of(kind: str, settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first setting that the class of this model_type refuses, and what it must be; None where
    it takes all.
    """
    declared = _declared().get(kind, {})
    for field, value in settings.items():
        if field not in declared:
            continue
        types = declared[field]
        if not any(_is(value, name) for name in types):
            words = map(_word, sorted(types, key=_is_list))  # what a list has comes last
            return field, f"must be {' or '.join(words)}, not {str(value)[:40]}"
        if field in _FUNCTIONS and value is not None and value not in ACTIVATIONS.split():
            return field, f"{str(value)[:40]!r} is none of {', '.join(ACTIVATIONS.split())}"
        if value is None and field in _NUMBERS:
            return field, "must be a number, not null"
        count = _LENGTHS.get(field)
        if count and isinstance(value, list) and len(value) != count:
            return field, f"must be a list of {count} numbers, not {len(value)}"
        share = "drop" in field or field == "initializer_range"
        if share and isinstance(value, int | float) and not 0 <= value <= 1:
            return field, f"must be a share from 0 to 1, not {str(value)[:40]}"
    labels = settings.get("id2label")
    if labels is not None and not _are_labels(labels):
        return "id2label", "must be an object with a number for each name"
    return None


def problem_of_kinds(settings: Mapping[str, Any], layers: object) -> tuple[str, str] | None:
    """The same of lists with a name for each of so many layers, which all classes check, those that
    read none, too.
    """
    for field, known in (("layer_types", LAYER_TYPES), ("mlp_layer_types", MLP_LAYER_TYPES)):
        kinds = settings.get(field)
        if kinds is None:  # classes then do not look at the second
            return None
        listed = isinstance(kinds, list | tuple)
        if not listed or not all(isinstance(kind, str) and kind in known.split() for kind in kinds):
            return field, f"must be a list of names, of {', '.join(known.split())}"
        if len(kinds) != layers:
            return field, f"must be a list of {layers} names, one per layer, not {len(kinds)}"
    return None


def _are_labels(labels: object) -> bool:
    try:
        return isinstance(labels, Mapping) and all(int(key) is not None for key in labels)
    except ValueError:
        return False


def _word(name: str) -> str:
    if _is_list(name):
        return f"a list, each {' or '.join(map(_word, _inner(name)))}"
    return _WORDS.get(name, name.removeprefix("="))


def _is_list(name: str) -> bool:
    return name.startswith("list[")


def _inner(name: str) -> list[str]:
    return name.removeprefix("list[").removesuffix("]").split(",")


def _is(value: object, name: str) -> bool:
    """Whether a value of JSON has this type, as transformers' checks have it."""
    if _is_list(name):
        parts = _inner(name)
        return isinstance(value, list | tuple) and all(
            any(_is(entry, part) for part in parts) for entry in value
        )
    match name:
        case "null":
            return value is None
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, float) or (isinstance(value, Mapping) and _FLOAT in value)
        case "str":
            return isinstance(value, str)
        case "dict":
            return isinstance(value, Mapping)
        case "list":
            return isinstance(value, list)
    return value == name.removeprefix("=")
