"""Our engine on a GPU against what the GPU can do, and beside transformers' continuous batching.

    make bench-gpu [SETUP=0] [ARGS="..."]
    python -m benchmarks.gpu [--json FILE] [--svg FILE] [--minutes N] [--vllm PYTHON]
                             [--compile LEVEL] [--device cuda] [--model "Llama-3-8B shape"]

Random weights of the shape of Llama-3-8B in bfloat16, made on the device. In turns, round by round:
decodes of 1, 8 and 64 rows at 1k tokens and of 8 at 4k, and prompts; then the share of the time in
which the device is idle, and sampling. Then 256 rows, first ours and then theirs, since both do not
fit; then ours without graphs, without steps launched ahead, and without fused layers; then vLLM,
where a Python has it. The bound of a decode is the bytes of weights, keys and values over the rate
at which this device read in this run; of prompts the rate of a large product. It ends in time: what
does not fit is left out, with a message.

`--device cpu --model tiny` runs all of it in seconds, to find faults of the program: its figures
mean nothing.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks import machine
from benchmarks.gpu import bounds, picture, shapes, theirs
from benchmarks.gpu.budget import Budget, LeftOutError
from benchmarks.gpu.ours import Ours, Target
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.theirs import Theirs
from benchmarks.gpu.vllm_engine import LONG

SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
}
# The same in its words: without one its top_k is 50.
THEIR_SAMPLING = {name: {"top_k": 0, **params} for name, params in SAMPLING.items()}
GREEDY = {"temperature": 0.0}
IDLE_STEPS = 16
UNFUSED = "layers not fused"
VARIANTS: dict[str, dict[str, Any]] = {
    "no graphs": {"cuda_graphs": "off"},
    "no steps ahead": {"async_batching": "off"},
    UNFUSED: {"fused": False},
}


class Plan(NamedTuple):
    """What is measured. ``cases``: rows and context of decodes that are measured in turns;
    ``crowd``: those of the largest one; ``start``: seconds that a start may take.
    """

    cases: tuple[tuple[int, int], ...]
    crowd: tuple[int, int]
    prompts: tuple[int, int]
    steps: int
    rounds: int
    start: float

    def sizes(self, cases: tuple[tuple[int, int], ...]) -> Sizes:
        """Of an engine for these cases."""
        return Sizes(cases, self.steps)


PLANS = {
    shapes.LLAMA: Plan(
        cases=((1, 1024), (8, 1024), (64, 1024), (8, 4096)),
        crowd=(256, 1024),
        prompts=(8, 2048),
        steps=48,
        rounds=3,
        start=60.0,
    ),
    shapes.TINY: Plan(
        cases=((1, 24), (3, 24), (4, 24), (2, 40)),
        crowd=(6, 24),
        prompts=(2, 32),
        steps=4,
        rounds=2,
        start=1.0,
    ),
}


class Run:
    """One run of the whole benchmark."""

    def __init__(
        self, target: Target, plan: Plan, report: Report, budget: Budget, compiled: int = 0
    ) -> None:
        self.compiled = compiled
        self.target, self.plan, self.report, self.budget = target, plan, report, budget
        large = target.device.type == "cuda"
        self.machine = bounds.measure(target.device, target.dtype, large=large)
        size = shapes.save(target.name, target.dtype, target.folder)
        config = shapes.config(target.name, target.dtype)
        self.work = bounds.Work.of(size, config, target.dtype)
        # The fastest in turns; its own choice before any was tried.
        self.their_settings: Mapping[str, Any] = {}
        report.notes.append(
            f"The device reads {self.machine.read / 1e9:.0f} GB/s by {self.machine.by} and "
            f"multiplies {self.machine.product / 1e12:.4g} TFLOP/s."
        )

    def all(self, vllm: str) -> None:
        budget, start = self.budget, self.plan.start
        budget.run("in turns", start, self.in_turns)
        budget.run("the largest batch", start, self.crowd)
        for name, settings in VARIANTS.items():
            budget.run(name, start, lambda name=name, given=settings: self.variant(name, given))  # type: ignore[misc]  # mypy infers no type of such a lambda
        budget.run("vLLM", 2 * start, lambda: self.vllm(vllm))

    def decodes(self, rows: int, context: int, more: str = "") -> Row:
        """The row of these decodes."""
        bound = self.work.decode_bytes(rows, context) / self.machine.read * 1e3
        name = f"decode, {rows} rows at {context}{more}"
        return self.report.row(name, "ms a step", bound)

    def prefills(self) -> Row:
        rows, length = self.plan.prompts
        name = f"prompts, {rows} of {length}"
        return self.report.row(name, "TFLOP/s", self.machine.product / 1e12, more=True)

    def in_turns(self) -> None:
        with self._ours(self.plan.sizes(self.plan.cases)) as ours:
            ours.first_token()
            self.report.cold = ours.cold
            self._warm(ours)
            side = self.budget.run("transformers", self.plan.start, self._theirs)
            for number in range(self.plan.rounds):
                name = f"round {number + 1}"
                self.budget.run(name, self.plan.start / 4, lambda: self._round(ours, side))
            self.budget.run("idle time", 10, lambda: self._idle(ours))
            if side is not None:
                self.budget.run("transformers, idle time", 20, lambda: self._their_idle(side))
                side.close()
            model = None if side is None else side.model
            for name in SAMPLING:
                label = f"sampling, {name}"
                self.budget.run(label, 5, lambda name=name: self._sampled(name, ours, model))  # type: ignore[misc]  # mypy infers no type of such a lambda

    def _warm(self, ours: Ours) -> None:
        """What compiles, compiles before the first round."""
        for rows, context in self.plan.cases:
            ours.decode(rows, context, 2, **GREEDY)
        for params in SAMPLING.values():
            ours.decode(self.plan.cases[0][0], self.plan.cases[0][1], 2, **params)

    def _theirs(self) -> Theirs:
        model, sizes = self._model(), self.plan.sizes(self.plan.cases)
        rows, context = self.plan.cases[1]
        tried = theirs.candidates(self.compiled)
        name, said = theirs.best(model, sizes, rows, context, 8, tried)
        more = "" if self.compiled else " torch.compile was not tried (--compile)."
        self.report.notes.append(
            f"transformers' settings, the fastest of those that run, {name}: {said}.{more}"
        )
        self.their_settings = tried[name]
        return Theirs(model, sizes, self.their_settings)

    def _round(self, ours: Ours, side: Theirs | None) -> None:
        steps = self.plan.steps
        for rows, context in self.plan.cases:
            row = self.decodes(rows, context)
            row.ours.append(statistics.median(ours.decode(rows, context, steps, **GREEDY)))
            if side is not None:
                row.theirs.append(statistics.median(side.decode(rows, context, steps)))
        prompts, length = self.plan.prompts
        operations = self.work.prefill_operations(prompts, length) / 1e12
        row = self.prefills()
        row.ours.append(operations / ours.prefill(prompts, length))
        if side is not None:
            row.theirs.append(operations / side.prefill(prompts, length))

    def _idle(self, ours: Ours) -> None:
        for rows, context in self.plan.cases[:3]:
            self._idle_row(rows, context).ours.append(100 * ours.idle(rows, context, IDLE_STEPS))

    def _their_idle(self, side: Theirs) -> None:
        for rows, context in self.plan.cases[:3]:
            self._idle_row(rows, context).theirs.append(100 * side.idle(rows, context, IDLE_STEPS))

    def _idle_row(self, rows: int, context: int) -> Row:
        return self.report.row(f"device idle, {rows} rows at {context}", "% of the time")

    def _sampled(self, name: str, ours: Ours, model: Any) -> None:
        """In turns: transformers' manager samples all requests in one way, so each has its own."""
        case, steps = self.plan.cases[2], self.plan.steps
        row, ran = self.decodes(*case, f", {name}"), list[Theirs]()

        def start() -> None:
            sizes = self.plan.sizes((case,))
            ran.append(Theirs(model, sizes, self.their_settings, **THEIR_SAMPLING[name]))
            ran[0].decode(*case, 2)

        if model is not None:
            self.budget.run(f"transformers, {name}", self.plan.start / 2, start)
        try:
            for _ in range(self.plan.rounds):
                row.ours.append(statistics.median(ours.decode(*case, steps, **SAMPLING[name])))
                for side in ran:
                    row.theirs.append(statistics.median(side.decode(*case, steps)))
        finally:
            for side in ran:
                side.close()

    def crowd(self) -> None:
        """Ours and then theirs: both caches do not fit beside both copies of the weights."""
        rows, context = self.plan.crowd
        sizes, row = self.plan.sizes((self.plan.crowd,)), self.decodes(rows, context)
        with self._ours(sizes) as ours:
            ours.decode(rows, context, 2, **GREEDY)
            row.ours += [
                statistics.median(ours.decode(rows, context, self.plan.steps, **GREEDY))
                for _ in range(2)
            ]
        self.budget.run("transformers, the largest batch", 30, lambda: self._their_crowd(row))

    def _their_crowd(self, row: Row) -> None:
        rows, context = self.plan.crowd
        side = Theirs(self._model(), self.plan.sizes((self.plan.crowd,)), self.their_settings)
        try:
            side.decode(rows, context, 2)
            row.theirs.append(statistics.median(side.decode(rows, context, self.plan.steps)))
        finally:
            side.close()

    def _model(self) -> Any:
        """transformers' own."""
        target = self.target
        return shapes.make(target.name, target.dtype, target.device, "sdpa")

    def variant(self, name: str, settings: Mapping[str, Any]) -> None:
        cases = self.plan.cases[0], self.plan.cases[2]
        with self._ours(self.plan.sizes(cases), **settings) as ours:
            for rows, context in cases:
                ours.decode(rows, context, 2, **GREEDY)
                row = self.decodes(rows, context, f", {name}")
                for _ in range(self.plan.rounds):
                    taken = ours.decode(rows, context, self.plan.steps, **GREEDY)
                    row.ours.append(statistics.median(taken))

    def vllm(self, python: str) -> None:
        """Its own figure, in a process of its own."""
        if not python and importlib.util.find_spec("vllm") is None:
            raise LeftOutError("it is not installed beside this Python, and --vllm names no other")
        cases = [*self.plan.cases, self.plan.crowd]
        numbers = [str(n) for case in cases for n in (*case, self.plan.steps)]
        longest = max(context + LONG * self.plan.steps for _, context in cases)
        dtype = str(self.target.dtype).removeprefix("torch.")
        program = Path(__file__).with_name("vllm_engine.py")
        command = [python or sys.executable, str(program), str(self.target.folder), dtype]
        ran = subprocess.run(
            [*command, str(longest), *numbers],
            stdout=subprocess.PIPE,
            text=True,
            timeout=max(1.0, self.budget.left),
            check=True,
        )
        answer = json.loads(ran.stdout.splitlines()[-1])
        figures = zip(cases, answer["milliseconds"], strict=True)
        said = "; ".join(f"{rows} rows at {at}: {ms:.2f} ms" for (rows, at), ms in figures)
        self.report.notes.append(f"vLLM {answer['version']}, decodes by itself: {said}.")

    @contextmanager
    def _ours(self, sizes: Sizes, **settings: Any) -> Iterator[Ours]:
        ours = Ours(self.target, sizes, **settings)
        try:
            yield ours
        finally:
            ours.close()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    minutes = float(os.environ.get("FAIRLEAD_MINUTES", "10"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(shapes.SHAPES), default=shapes.LLAMA)
    parser.add_argument("--minutes", type=float, default=minutes, help="it ends before them")
    parser.add_argument(
        "--compile",
        type=int,
        choices=range(4),
        default=0,
        help="transformers' default_compile_level, tried beside its other settings: takes minutes",
    )
    parser.add_argument("--vllm", default="", help="a Python that has vLLM")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--svg", type=Path, help="draw them to this file")
    parser.add_argument(
        "--folder", type=Path, help="for the directory without weights; default: a temporary one"
    )
    return parser.parse_args()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine.processor()


def write(report: Report, given: argparse.Namespace) -> None:
    print("", *report.lines(), sep="\n", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(report.value(), indent=1) + "\n")
    if given.svg is not None:
        given.svg.write_text("\n".join(picture.draw(report)) + "\n")


def main() -> None:
    given = options()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU, and torch sees none")
    warnings.filterwarnings("ignore", module="transformers")
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    budget = Budget(given.minutes * 60 - 45)  # what is left over is for ending and writing
    report = Report(device_name(device), given.model, str(dtype).removeprefix("torch."))
    report.left_out = budget.left_out
    with tempfile.TemporaryDirectory() as temporary:
        target = Target(given.model, given.folder or Path(temporary), dtype, device)
        try:
            Run(target, PLANS[given.model], report, budget, given.compile).all(given.vllm)
        finally:  # an interrupted run has figures too
            write(report, given)


if __name__ == "__main__":
    main()
