"""Write the generated tables of docs/ from the code. `--check` writes nothing and exits with 1 when
they are out of date.

Each table is between two marker lines of its page:  <!-- NAME: generated ... -->  and  <!-- end
of NAME -->
"""

import argparse
import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import model_names
import yaml
from pydantic import BaseModel

from fairlead_operator.decide.pods.blockers import CODES, NORMAL
from fairlead_runtime.api.bodies.harmless_fields import HARMLESS
from fairlead_runtime.api.bodies.refused_fields import REFUSED, Refused
from fairlead_runtime.api.bodies.request_bodies import ChatBody, CompletionBody
from fairlead_runtime.api.responses.bodies import _REFUSED, ResponseBody
from fairlead_runtime.settings.engine_config import (
    PROCESS,
    SECTIONS,
    EngineConfig,
    base_type,
    choices_of,
    flag_of,
    section_of,
)
from fairlead_runtime.settings.other_names import OTHER_NAMES, VLLM
from fairlead_runtime.settings.supported import NOT_YET
from fairlead_runtime.settings.vllm_names import FLAGS, SAME, SHORT

ROOT = Path(__file__).parents[1]
VALUES = ROOT / "charts" / "fairlead" / "values.yaml"
PEER_FIELDS = ROOT / "scripts" / "peer_fields.json"
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
        if alias.whose == VLLM and not alias.setting:
            continue  # these are many: docs/from-vllm.md has them
        flag = f"`{flag_of(alias.setting)}`" if alias.setting else "none"
        lines.append(f"| `{alias.name}` | {alias.whose} | {flag} | {alias.note} |")
    return "\n".join(lines)


def vllm_flags() -> str:
    """The flags of `vllm serve`, each with ours."""
    lines = ["| `vllm serve` | here | |", "|---|---|---|"]
    lines += [f"| `{flag_of(name)}` | the same | {note} |" for name, note in SAME.items()]
    for name, (setting, note) in FLAGS.items():
        flag = f"`{flag_of(setting)}`" if setting else "none"
        theirs = f"-{name}" if name in SHORT else flag_of(name)
        lines.append(f"| `{theirs}` | {flag} | {note} |")
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


ROUTES: Mapping[str, type[BaseModel]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponseBody,
}


def peer_fields() -> str:
    """Every request field of OpenAI's API and of other servers, with what becomes of it here."""
    sources = json.loads(PEER_FIELDS.read_text())["sources"]

    def known(name: str, route: str) -> bool:
        return any(name in of(each, route) for each in sources)

    lines = ["| field | whose | chat | completions | responses |", "|---|---|---|---|---|"]
    found = {name for each in sources for route in ROUTES for name in of(each, route)}
    names = sorted(found | REFUSED.keys())
    for name in names:
        whose = [each["whose"] for each in sources if any(name in of(each, r) for r in ROUTES)]
        fates = [
            fate(name, route) if known(name, route) or name in refused_of(route) else "-"
            for route in ROUTES
        ]
        lines.append(f"| `{name}` | {', '.join(whose) or 'others'} | {' | '.join(fates)} |")
    lines += [
        "",
        textwrap.fill(f"Read in {'; '.join(map(origin, sources))}.", 120, break_on_hyphens=False),
    ]
    return "\n".join(lines)


def of(source: Mapping[str, Any], route: str) -> Sequence[str]:
    names: Sequence[str] = source["fields"].get(route, ())
    return names


def origin(source: Mapping[str, Any]) -> str:
    if "release" in source:
        return f"`{source['repository']}` {source['release']}"
    commits = {commit[:12] for commit in source["files"].values()}
    return f"`{source['repository']}` at {', '.join(f'`{commit}`' for commit in sorted(commits))}"


def refused_of(route: str) -> Mapping[str, Refused]:
    """What the route refuses: of a response also what a chat refuses."""
    if route == "responses":
        own = {*ResponseBody.model_fields, *ChatBody.model_fields}
        return {name: why for name, why in REFUSED.items() if name not in own} | _REFUSED
    return {name: why for name, why in REFUSED.items() if name not in ROUTES[route].model_fields}


def fate(name: str, route: str) -> str:
    refusal = refused_of(route).get(name)
    if refusal is None:
        return f"ignored: {HARMLESS[name]}" if name in HARMLESS else "honoured"
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in refusal.neutral)
    only = f" unless {neutral}" if neutral else ""
    return f"refused{only}; {refusal.instead}"


TABLES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "names": ("models.md", model_names.table),
    "flags": ("runtime.md", flags),
    "supported": ("runtime.md", supported),
    "other names": ("runtime.md", other_names),
    "vllm": ("from-vllm.md", vllm_flags),
    "blockers": ("troubleshooting.md", blockers),
    "values": ("chart.md", values),
    "alerts": ("chart.md", alerts),
    "peer fields": ("fields.md", peer_fields),
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
