"""Write the generated tables of docs/ from the code. `--check` writes nothing and exits with 1 when
they are out of date.

Each table is between two marker lines of its page:  <!-- NAME: generated ... -->  and  <!-- end
of NAME -->
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fairlead_operator.decide.pods.blockers import CODES, NORMAL
from fairlead_runtime.settings.engine_config import (
    PROCESS,
    SECTIONS,
    EngineConfig,
    base_type,
    choices_of,
    flag_of,
    section_of,
)
from fairlead_runtime.settings.other_names import OTHER_NAMES
from fairlead_runtime.settings.supported import NOT_YET

ROOT = Path(__file__).parents[1]
VALUES = ROOT / "charts" / "fairlead" / "values.yaml"
ALERTS = ROOT / "charts" / "fairlead" / "files" / "alerts.yaml"
LIMITS = {limit.field: limit for limit in NOT_YET}


def default_of(value: object) -> str:
    if value is None or value == "":
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def cr_field(path: str | None) -> str:
    return f"`spec.{path}`" if path else "none"


def flags() -> str:
    """EngineConfig: one table for each part of the custom resource, one row for each flag."""
    lines: list[str] = []
    every = dataclasses.fields(EngineConfig)
    for title in (*SECTIONS.values(), PROCESS):
        lines += ["", f"### {title}", ""]
        head = "| flag | unit or values | default | what it sets | when to change it "
        lines.append(head + "| custom resource |")
        lines += ["|---|---|---|---|---|---|"]
        lines += [flag_row(f) for f in every if section_of(f) == title]
    return "\n".join(lines).strip()


def flag_row(f: "dataclasses.Field[Any]") -> str:
    meta, kind = f.metadata, base_type(f.name)
    values = ", ".join(f"`{c}`" for c in choices_of(f.name)) or meta["unit"]
    values = values or {bool: "on, off", str: "text", int: "number", float: "number"}[kind]
    limit = LIMITS.get(f.name)
    when = f"Supported so far: {limit.fix}." if limit else meta["when"]
    name = flag_of(f.name)
    flag = f"`--[no-]{name[2:]}`" if kind is bool else f"`{name}`"
    cr = cr_field(meta["cr"])
    return f"| {flag} | {values} | {default_of(f.default)} | {meta['help']} | {when} | {cr} |"


def supported() -> str:
    """The values that are not implemented yet: one row for each setting."""
    lines = ["| flag | custom resource | supported | not yet | why |", "|---|---|---|---|---|"]
    lines += [
        f"| `{flag_of(limit.field)}` | {cr_field(limit.path)} | {limit.fix} | {limit.refused} "
        f"| {limit.reason} |"
        for limit in NOT_YET
    ]
    return "\n".join(lines)


def other_names() -> str:
    """Other engines' names of settings, each with ours."""
    lines = ["| there | whose | here | |", "|---|---|---|---|"]
    for alias in OTHER_NAMES:
        flag = f"`{flag_of(alias.setting)}`" if alias.setting else "none"
        lines.append(f"| `{alias.name}` | {alias.whose} | {flag} | {alias.note} |")
    return "\n".join(lines)


def blockers() -> str:
    """The blocker codes in the order of importance."""
    lines = ["| code | what to do | kind |", "|---|---|---|"]
    lines += [
        f"| `{code}` | {hint} | {'stage' if code in NORMAL else 'fault'} |"
        for code, hint in CODES.items()
    ]
    return "\n".join(lines)


def values() -> str:
    """Every value of the chart, with the comments of values.yaml."""
    text = VALUES.read_text()
    lines = ["| value | default | what it sets |", "|---|---|---|"]
    document = yaml.compose(text)
    assert document is not None
    for path, key, value in nodes(document):
        is_group = isinstance(value, yaml.MappingNode) and not value.flow_style
        words = comment(text.splitlines(), key, value).replace("|", "\\|")
        if not words and not is_group:
            raise SystemExit(f"values.yaml: {path} has no comment: say what it sets")
        default = "" if is_group else f"`{text[value.start_mark.index : value.end_mark.index]}`"
        lines += [f"| `{path}` | {default} | {words} |"] if words else []
    return "\n".join(lines)


def nodes(mapping: yaml.Node, path: str = "") -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Path, key and value of every entry, down to those that are written on one line."""
    for key, value in mapping.value:
        here = f"{path}.{key.value}".lstrip(".")
        yield here, key, value
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from nodes(value, here)


def comment(lines: Sequence[str], key: yaml.Node, value: yaml.Node) -> str:
    """The comment above the key, then the one behind it on its line."""
    number = key.start_mark.line
    above: list[str] = []
    for line in reversed(lines[:number]):
        if not line.startswith(" " * key.start_mark.column + "#"):
            break
        above.insert(0, line.strip().removeprefix("#").strip())
    last = value if value.end_mark.line == number else key
    _, _, behind = lines[number][last.end_mark.column :].partition(" # ")
    return " ".join([*above, behind]).strip()


def alerts() -> str:
    """The chart's alerts, in the order of their file."""
    lines = ["| alert | severity | after | what it says, and what to do |", "|---|---|---|---|"]
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        says = rule["annotations"]
        words = re.sub(r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}", r"*\1*", ". ".join(says.values()))
        words = words.replace("serving_fairlead_dev_name", "name")
        severity = rule["labels"]["severity"]
        lines.append(f"| `{rule['alert']}` | {severity} | {rule.get('for', '0m')} | {words} |")
    return "\n".join(lines)


TABLES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "flags": ("runtime.md", flags),
    "supported": ("runtime.md", supported),
    "other names": ("runtime.md", other_names),
    "blockers": ("troubleshooting.md", blockers),
    "values": ("chart.md", values),
    "alerts": ("chart.md", alerts),
}


def renewed(page: str, name: str, table: str) -> str:
    """The page with the text between the two markers of ``name`` replaced."""
    start, end = f"<!-- {name}: generated by scripts/make_docs.py -->", f"<!-- end of {name} -->"
    if page.count(start) != 1 or page.count(end) != 1:
        raise SystemExit(f"each of the two markers of {name} must appear once in its page")
    pattern = re.escape(start) + ".*" + re.escape(end)
    return re.sub(pattern, lambda _: f"{start}\n{table}\n{end}", page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a page is out of date"
    )
    check = parser.parse_args().check
    stale = []
    for name, (page, make) in TABLES.items():
        path = ROOT / "docs" / page
        before = path.read_text()
        after = renewed(before, name, make())
        if before != after:
            stale.append(page)
            if not check:
                path.write_text(after)
    if check and stale:
        print(
            f"out of date: {', '.join(stale)}; run `make generate`",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
