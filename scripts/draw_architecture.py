"""Draw docs/pictures/architecture.svg from the import contracts in pyproject.toml. `--check` writes
nothing and exits with 1 when it is out of date.

Reads the layers, and which libraries each room may import. Owns the captions and the layout.
"""

import argparse
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"
OPERATOR, RUNTIME, KERNELS = "fairlead_operator", "fairlead_runtime", "fairlead_kernels"

CAPTIONS = {
    f"{OPERATOR}.__main__": "composition root: arguments → Settings",
    f"{OPERATOR}.app": "the process: tasks and clients",
    f"{OPERATOR}.commands": "fairlead plan, backtest",
    f"{OPERATOR}.logs": "JSON lines",
    f"{OPERATOR}.reconcile": "one pass over one resource",
    f"{OPERATOR}.upgrades": "whose turn it is in an upgrade",
    f"{OPERATOR}.workqueue": "which key is due when",
    f"{OPERATOR}.health": "probes, /metrics",
    f"{OPERATOR}.probe": "requests to pods and the model hub",
    f"{OPERATOR}.cluster": "the API server",
    f"{OPERATOR}.memory": "what passes and probes remember",
    f"{OPERATOR}.decide": "what the operator decides",
    f"{OPERATOR}.decide.judge": "what keeps a resource from being ready",
    f"{OPERATOR}.decide.status": "conditions, capacity, blockers → status",
    f"{OPERATOR}.decide.scale": "how many replicas",
    f"{OPERATOR}.decide.children": "objects, diff, rollout",
    f"{OPERATOR}.decide.release": "which release serves a resource",
    f"{OPERATOR}.decide.pods": "what pods, events and metrics say",
    f"{OPERATOR}.resource": "the custom resource as frozen values",
    f"{OPERATOR}.metrics": "fairlead_operator_*",
    f"{OPERATOR}.errors": "how requests to the API server fail",
    f"{RUNTIME}.__main__": "python -m fairlead_runtime",
    f"{RUNTIME}.cli": "finds the command",
    f"{RUNTIME}.commands": "serve, fetch, generate, trace, replay",
    f"{RUNTIME}.llm": "the Python API: LLM.generate",
    f"{RUNTIME}.processes": "composition root: one for HTTP, the engine, each rank",
    f"{RUNTIME}.build": "settings and files → a ready engine",
    f"{RUNTIME}.api": "HTTP: routes and bodies",
    f"{RUNTIME}.api.ports": "applications, probes, drain, the page",
    f"{RUNTIME}.api.routes": "completions, chats, tokenization",
    f"{RUNTIME}.api.responses": "OpenAI's Responses",
    f"{RUNTIME}.api.anthropic": "Anthropic's Messages",
    f"{RUNTIME}.api.bodies": "of requests",
    f"{RUNTIME}.api.answers": "bodies of answers",
    f"{RUNTIME}.api.state": "loading, serving, draining; traces",
    f"{RUNTIME}.api.tools": "tool calls, reasoning",
    f"{RUNTIME}.front": "connections, keys, limits, TLS, errors",
    f"{RUNTIME}.serving": "Submission → Request; tokens → text; metrics",
    f"{RUNTIME}.engine": "the step loop, its inbox, fault isolation",
    f"{RUNTIME}.outputs": "values between service, API and engine",
    f"{RUNTIME}.device": "forward pass, KV cache, sampling",
    f"{RUNTIME}.device.warmup": "at start: memory by term, how decodes run",
    f"{RUNTIME}.device.proof": "at start: the self-test, sums in one order, graphs",
    f"{RUNTIME}.device.step": "forward passes, decodes, launched steps, graphs",
    f"{RUNTIME}.device.ranks": "a split model's shards and messages",
    f"{RUNTIME}.device.sampling": "logits → tokens",
    f"{RUNTIME}.device.conversion": "at start: layers recognized, fused",
    f"{RUNTIME}.device.model": "packed rows on the paged cache, fused layers",
    f"{RUNTIME}.device.memory": "cache tensors, offload, streams",
    f"{RUNTIME}.recording": "record, replay, trace",
    f"{RUNTIME}.hub": "download of weights",
    f"{RUNTIME}.scheduling": "plan → commit → update",
    f"{RUNTIME}.cache": "blocks, prefixes, offload: numbers only",
    f"{RUNTIME}.models": "files, checks, loading, chat templates",
    f"{RUNTIME}.grammar": "structured output: check, compile, masks",
    f"{RUNTIME}.sizing": "memory equation: terms → blocks",
    f"{RUNTIME}.settings": "EngineConfig, what is supported",
    f"{RUNTIME}.request": "what a client asks for",
    f"{RUNTIME}.child": "our programs in processes of their own",
    f"{KERNELS}.choice": "which kernels serve this model on this device",
    f"{KERNELS}.gpu": "attention, layers, experts in Triton",
    f"{KERNELS}.cpu": "attention and layers in C++",
    f"{KERNELS}.plain": "the same in torch, on every device",
    f"{KERNELS}.packages": "flashinfer, humming",
    f"{KERNELS}.proofs": "kernels beside their definitions",
    f"{KERNELS}.interface": "what kernels offer, and its definition",
    f"{KERNELS}.sampling": "cuts, draws, edits of logits",
    f"{KERNELS}.formats": "matrices of 8 and 4 bits",
}
# Libraries with a contract of their own → the mark on the rooms that may import them.
LIBRARIES = {"kopf": "kopf, kubernetes", "httpx": "HTTP client", "uvicorn": "fastapi, uvicorn"}

PAD, GAP, ROW, LINE, CHAR = 12, 6, 30, 15, 6.4
WIDTH, COLUMNS = 1160, {OPERATOR: (20, 440), RUNTIME: (530, 610)}
STYLE = """
  svg { font-family: system-ui, "DejaVu Sans", sans-serif; }
  .page { fill: #ffffff; } .package { fill: #f3f4f6; stroke: #9ca3af; }
  .room { fill: #ffedd5; stroke: #9a3412; } .notorch { fill: #dbeafe; stroke: #1e40af; }
  text { fill: #111827; font-size: 12px; } .title { font-size: 15px; font-weight: bold; }
  .name { font-size: 12px; font-weight: bold; } .mark { font-style: italic; }
  .door { stroke: #111827; stroke-width: 1.5; fill: none; } .head { fill: #111827; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; } .package { fill: #161b22; stroke: #6b7280; }
    .room { fill: #431407; stroke: #fdba74; } .notorch { fill: #172554; stroke: #93c5fd; }
    text { fill: #f3f4f6; } .door { stroke: #f3f4f6; } .head { fill: #f3f4f6; }
  }
"""


class Contracts:
    """The import contracts: the rooms of each container, and what each must not import."""

    def __init__(self, contracts: list[dict[str, Any]]) -> None:
        self.layers: dict[str, list[list[str]]] = {
            container: [
                [name.strip() for name in layer.replace(":", "|").split("|")]
                for layer in contract["layers"]
            ]
            for contract in contracts
            for container in contract.get("containers", ())
        }
        self._forbidden = [
            (contract["source_modules"], contract["forbidden_modules"])
            for contract in contracts
            if contract["type"] == "forbidden"
        ]

    def rooms(self) -> Iterator[str]:
        for container, layers in self.layers.items():
            yield from (f"{container}.{name}" for layer in layers for name in layer)

    def may_import(self, room: str, module: str) -> bool:
        return not any(
            _covers(sources, room) and _covers(forbidden, module)
            for sources, forbidden in self._forbidden
        )


def _covers(names: list[str], module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def contracts() -> Contracts:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rules = Contracts(project["tool"]["importlinter"]["contracts"])
    if missing := sorted(set(rules.rooms()) ^ CAPTIONS.keys()):
        raise SystemExit(f"{Path(__file__).name}: CAPTIONS and the contracts differ in {missing}")
    return rules


class Box(NamedTuple):
    left: float
    top: float
    width: float
    height: float


class Drawing:
    """The picture's elements, and where each room lies."""

    def __init__(self, rules: Contracts) -> None:
        self.rules = rules
        self.lines: list[str] = []
        self.boxes: dict[str, Box] = {}

    def rect(self, kind: str, box: Box) -> None:
        left, top, width, height = box
        self.lines.append(
            f'<rect class="{kind}" x="{left:g}" y="{top:g}" width="{width:g}" '
            f'height="{height:g}" rx="5"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.lines.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def door(self, path: str, x: float, y: float, *, down: bool = False) -> None:
        """A line that ends with an arrow at (x, y)."""
        self.lines.append(f'<path class="door" d="{path}"/>')
        head = f"M{x - 5:g} {y - 8:g}h10l-5 8z" if down else f"M{x - 8:g} {y - 5:g}v10l8 -5z"
        self.lines.append(f'<path class="head" d="{head}"/>')

    def marks(self, room: str) -> str:
        """What the room may do besides computing, from the contracts; "pure" where it may not."""
        if room.endswith("__main__"):
            return ""
        if not self.rules.may_import(room, "time"):
            return "pure"
        allowed = [word for name, word in LIBRARIES.items() if self.rules.may_import(room, name)]
        return "; ".join(allowed)

    def layers(self, container: str, box: Box) -> float:
        """Draw the rooms of a container from the top down; the y below the last."""
        top = box.top
        for names in self.rules.layers[container]:
            width = (box.width - GAP * (len(names) - 1)) / len(names)
            height = max(self._height(f"{container}.{name}", width, len(names)) for name in names)
            for place, name in enumerate(names):
                left = box.left + place * (width + GAP)
                self._room(f"{container}.{name}", Box(left, top, width, height), len(names))
            top += height + GAP
        return top

    def _caption(self, room: str, width: float) -> list[str]:
        return textwrap.wrap(CAPTIONS[room], int((width - PAD) / CHAR))

    def _height(self, room: str, width: float, beside: int) -> float:
        if room in self.rules.layers:
            inner = Drawing(self.rules)
            return inner.layers(room, Box(0, ROW, width - 2 * PAD, 0)) + GAP
        return ROW if beside == 1 else ROW - 2 + LINE * len(self._caption(room, width))

    def _room(self, room: str, box: Box, beside: int) -> None:
        self.boxes[room] = box
        left, top, width, _ = box
        torch = self.rules.may_import(room, "torch")
        self.rect("room" if torch else "notorch", box)
        name, mark = room.rpartition(".")[2], self.marks(room)
        around = room.rpartition(".")[0]
        if "." in around and mark == self.marks(around):
            mark = ""
        self.text(left + 8, top + 19, name, "name")
        if beside == 1:
            self.text(left + 24 + 7.8 * len(name), top + 19, CAPTIONS[room])
        else:
            for number, line in enumerate(self._caption(room, width)):
                self.text(left + 8, top + 35 + LINE * number, line)
        if mark:
            self.text(left + width - 8, top + 19, mark, "mark", "end")
        if room in self.rules.layers:
            self.layers(room, Box(left + PAD, top + ROW, width - 2 * PAD, 0))


def picture() -> str:
    rules = contracts()
    drawing = Drawing(rules)
    ends = {}
    for package, (left, width) in COLUMNS.items():
        inside = Box(left + PAD, 78, width - 2 * PAD, 0)
        probe = Drawing(rules)
        ends[package] = probe.layers(package, inside)
        drawing.rect("package", Box(left, 44, width, ends[package] - 44 + GAP))
        drawing.text(left + PAD, 66, package, "title")
        drawing.layers(package, inside)
    _kernels(drawing, ends[RUNTIME])
    _doors(drawing, rules)
    kernels = drawing.boxes[KERNELS]
    bottom = kernels.top + kernels.height + PAD
    _legend(drawing, ends[OPERATOR] + 40)
    drawing.text(20, 26, "A room imports from the rooms below it, never from one above.", "title")
    body = "\n".join(drawing.lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom:g}" role="img" '
        f'aria-label="The rooms of the three packages in their layers">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{bottom:g}"/>\n{body}\n</svg>\n'
    )


def _kernels(drawing: Drawing, top: float) -> None:
    left, width = COLUMNS[RUNTIME]
    inside = Box(left + PAD, top + 74, width - 2 * PAD, 0)
    end = Drawing(drawing.rules).layers(KERNELS, inside)
    box = Box(left, top + 40, width, end - top - 40 + GAP)
    drawing.boxes[KERNELS] = box
    drawing.rect("package", box)
    drawing.text(left + PAD, box.top + 22, KERNELS, "title")
    drawing.layers(KERNELS, inside)
    middle = left + width / 2
    drawing.door(f"M{middle:g} {top + GAP:g}V{box.top - 8:g}", middle, box.top, down=True)


def _doors(drawing: Drawing, rules: Contracts) -> None:
    """A way in at each room of the runtime that the operator may import, and arrows to the rows."""
    left, width = COLUMNS[OPERATOR]
    wall, hall = left + width, left + width + 34
    open_rooms = [
        box
        for room, box in drawing.boxes.items()
        if room.startswith(RUNTIME + ".")
        and not room.endswith("__main__")
        and rules.may_import(OPERATOR, room)
    ]
    heights = sorted({box.top + box.height / 2 for box in open_rooms})
    start = drawing.boxes[f"{OPERATOR}.resource"]
    y = start.top + start.height / 2
    drawing.lines.append(
        f'<path class="door" d="M{wall:g} {y:g}H{hall:g}M{hall:g} '
        f'{min([y, *heights]):g}V{max([y, *heights]):g}"/>'
    )
    for box in open_rooms:
        drawing.lines.append(
            f'<rect class="head" x="{box.left - 2:g}" y="{box.top:g}" '
            f'width="5" height="{box.height:g}"/>'
        )
    for height in heights:
        first = min(b.left for b in open_rooms if b.top + b.height / 2 == height)
        drawing.door(f"M{hall:g} {height:g}H{first - 10:g}", first - 2, height)


def _legend(drawing: Drawing, top: float) -> None:
    left = COLUMNS[OPERATOR][0]
    drawing.rect("notorch", Box(left, top - 12, 16, 16))
    drawing.text(left + 24, top, "must not import torch")
    drawing.rect("room", Box(left + 190, top - 12, 16, 16))
    drawing.text(left + 214, top, "may import torch")
    rows = (
        ("pure", "no I/O, no clock, no randomness"),
        ("→ and a thick edge", "the operator may import this room of the runtime"),
        (", ".join(LIBRARIES.values()), "only where marked"),
    )
    for number, (mark, meaning) in enumerate(rows, 1):
        drawing.text(left, top + 22 * number, f"{mark}: {meaning}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when the drawing is out of date"
    )
    check = parser.parse_args().check
    drawn = picture()
    if check and (not PICTURE.exists() or PICTURE.read_text() != drawn):
        print(
            f"{PICTURE.relative_to(ROOT)} is out of date: run `make generate`",
            file=sys.stderr,
        )
        return 1
    if not check:
        PICTURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
