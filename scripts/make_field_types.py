"""Write the types of settings that transformers' configuration classes of served families declare.

    python scripts/make_field_types.py

`--check` writes nothing and exits with 1 when the file is out of date.
Writes ``sizing/families/field_types.py`` of the runtime, which the plan reads without transformers.
A class refuses a value of another type, whether a size follows from it or not.
"""

import argparse
import textwrap
import types
import typing
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args, get_origin

import torch
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.configuration_utils import (
    _LEGACY_LAYER_TYPE_REMAP,
    ALLOWED_ATTN_LAYER_TYPES,
    ALLOWED_MLP_LAYER_TYPES,
)

from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.families.wholes import WHOLES
from fairlead_runtime.sizing.families.with_states import WITH_STATES
from fairlead_runtime.sizing.family_table import FAMILIES, TEXTS

FILE = Path(__file__).parents[1] / "runtime/fairlead_runtime/sizing/families/field_types.py"
SERVED = sorted({*FAMILIES, *SIZED, *WITH_STATES, *TEXTS, *WHOLES})
_HEAD = '''"""The types of settings that configuration classes of served families declare.

Written by ``scripts/make_field_types.py``. A line of ROWS has a setting, its types and the
model_types whose class declares it so, or after ``-`` those of SERVED whose class does not.
"""

'''


def words_of(kind: Any) -> str:
    """A declared type as the table has it, of what JSON may hold: "" where no class checks it."""
    if isinstance(kind, str):  # a name that nothing resolves
        return ""
    if kind in (None, types.NoneType):
        return "null"
    origin, args = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        parts = dict.fromkeys(part for arg in args for part in words_of(arg).split("|") if part)
        return "|".join(sorted(parts, key=lambda part: (part == "null", part)))
    if origin is typing.Literal:
        return "|".join(f"={value}" for value in args)
    if origin is list:
        return f"list[{words_of(args[0]).replace('|', ',')}]"
    if origin is tuple:  # no JSON has one
        return ""
    if origin is dict or (
        isinstance(kind, type) and not issubclass(kind, str | int | float | list)
    ):
        return "" if kind is torch.dtype else "dict"
    return str(kind.__name__)


def declared() -> dict[tuple[str, str], list[str]]:
    """By setting and its types the model_types that declare it so."""
    table = defaultdict[tuple[str, str], list[str]](list)
    for name in SERVED:
        for field in CONFIG_MAPPING[name].__dataclass_fields__.values():
            if words := words_of(field.type):
                table[field.name, words].append(name)
    return table


def text() -> str:
    """The module."""
    rows = []
    for (field, words), names in sorted(declared().items()):
        rest = [name for name in SERVED if name not in names]
        listed = f"- {' '.join(rest)}" if len(rest) < len(names) else " ".join(names)
        rows.append(f"{field} {words}: {listed}".rstrip())
    lines = [
        line
        for row in rows
        for line in textwrap.wrap(row, 96, subsequent_indent="  ", break_on_hyphens=False)
    ]
    kinds = (*ALLOWED_ATTN_LAYER_TYPES, *_LEGACY_LAYER_TYPE_REMAP)
    lists = {
        "SERVED": SERVED,
        "ACTIVATIONS": sorted(ACT2FN),
        "LAYER_TYPES": sorted(kinds),
        "MLP_LAYER_TYPES": sorted(ALLOWED_MLP_LAYER_TYPES),
    }
    parts = [
        f'{name} = """\n{textwrap.fill(" ".join(names), 96, break_on_hyphens=False)}\n"""\n'
        for name, names in lists.items()
    ]
    return _HEAD + "".join(parts) + 'ROWS = """\n' + "\n".join(lines) + '\n"""\n'


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    written = text()
    if parser.parse_args().check:
        return int(FILE.read_text() != written)
    FILE.write_text(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
