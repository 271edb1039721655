"""Our engine on a GPU against what the GPU can do, and beside transformers' continuous batching.

    make bench-gpu [SETUP=0] [ARGS="..."]
    python -m benchmarks.gpu [--json FILE] [--lines FILE] [--svg FILE] [--minutes N] [--ours-only]
                             [--only-cases 8x1024 ...] [--rounds N] [--set KNOB=VALUE ...]
                             [--vllm PYTHON] [--compile LEVEL] [--device cuda]
                             [--model "Llama-3-8B shape"]

Random weights of the shape of Llama-3-8B in bfloat16, made on the device. Ours first: decodes of 8
and 64 rows at 1k tokens, of 1 and of 8 at 4k, prompts, the share of the time in which the device is
idle, and sampling. Then the same in turns with transformers, round by round. Then 256 rows, first
ours and then theirs, since both do not fit; then ours without graphs, without steps launched ahead,
and without fused layers; then vLLM, where a Python has it. With `--ours-only` one engine has all
cases and the largest, no other starts, the kernels that take longest are listed, and both forms of
what finds the cuts of filters are timed (`--set cuts=triton` has a whole run by the one that does
not serve yet). The bound of a
decode is the bytes of weights, keys and values over the rate at which this device read in this run;
of prompts the rate of a large product. It ends in time: what does not fit or fails is left out by
itself, with a message.
`--lines` has each figure as soon as it is known.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks import machine
from benchmarks.gpu import bounds, cuts, picture, shapes, theirs
from benchmarks.gpu.budget import Budget, LeftOutError
from benchmarks.gpu.ours import Ours, Target
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.theirs import Theirs
from benchmarks.gpu.vllm_engine import LONG
from benchmarks.turns import OURS

SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
}
# The same in its words: without one its top_k is 50.
THEIR_SAMPLING = {name: {"top_k": 0, **params} for name, params in SAMPLING.items()}
IDLE_STEPS = 16
LISTED = 20  # kernels of a table
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

    @property
    def few(self) -> tuple[int, int]:
        """The case of the fewest rows."""
        return min(self.cases)

    @property
    def many(self) -> tuple[int, int]:
        """The case of the most rows but the largest batch's."""
        return max(self.cases)

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
    """One run of the whole benchmark; ``brief``: of the decodes of the plan's cases alone."""

    def __init__(
        self,
        target: Target,
        plan: Plan,
        report: Report,
        budget: Budget,
        *,
        compiled: int = 0,
        ours_only: bool = False,
        brief: bool = False,
    ) -> None:
        self.compiled, self.ours_only, self.brief = compiled, ours_only, brief
        self.target, self.plan, self.report, self.budget = target, plan, report, budget
        large = target.device.type == "cuda"
        self.machine = bounds.measure(target.device, target.dtype, large=large)
        size = shapes.save(target.name, target.dtype, target.folder)
        config = shapes.config(target.name, target.dtype)
        self.vocabulary: int = config.vocab_size
        self.work = bounds.Work.of(size, config, target.dtype)
        # The fastest in turns; its own choice before any was tried.
        self.their_settings: Mapping[str, Any] = {}
        report.note(
            f"The device reads {self.machine.read / 1e9:.0f} GB/s by {self.machine.by} and "
            f"multiplies {self.machine.product / 1e12:.4g} TFLOP/s."
        )

    def all(self, vllm: str) -> None:
        budget, start = self.budget, self.plan.start
        if self.ours_only:
            budget.run("one engine", 0, self.alone)
            return
        budget.run("in turns", start, self.in_turns)
        if self.brief:
            return
        budget.run("the largest batch", start, self.crowd)
        for name, settings in VARIANTS.items():
            budget.run(name, start, partial(self.variant, name, settings))
        budget.run("vLLM", 2 * start, lambda: self.vllm(vllm))

    def figure(self, row: Row, side: str, needs: float, work: Callable[[], float]) -> None:
        """Measure one figure of a side. It may fail, or have no time: no other is lost with it."""
        value = self.budget.run(f"{row.name}, {side}", needs, work)
        if value is not None:
            self.report.add(row, side, value)

    def decodes(self, rows: int, context: int, more: str = "") -> Row:
        """The row of these decodes."""
        bound = self.work.decode_bytes(rows, context) / self.machine.read * 1e3
        name = f"decode, {rows} rows at {context}{more}"
        return self.report.row(name, "ms a step", bound)

    def prefills(self) -> Row:
        rows, length = self.plan.prompts
        name = f"prompts, {rows} of {length}"
        return self.report.row(name, "TFLOP/s", self.machine.product / 1e12, more=True)

    def alone(self) -> None:
        """All of ours by one engine, what tells most first: a start takes longer than a figure."""
        plan, crowd = self.plan, self.plan.crowd
        with self._ours(plan.sizes(plan.cases if self.brief else (*plan.cases, crowd))) as ours:
            self._started(ours)
            self._round([ours])
            if self.brief:
                return
            self._idle(ours)
            for rows, context in (plan.few, plan.many):
                self._longest(ours, rows, context)
            work = partial(_decode, ours, *crowd, plan.steps)
            self.budget.run("warm-up of the largest batch", 0, lambda: ours.decode(*crowd, 2))
            self.figure(self.decodes(*crowd), ours.name, 0, work)
            for name in SAMPLING:
                self._sampled(name, ours, None)
            self._cut()
            self.budget.run("cuts in Triton", 0, partial(self._cut_in_triton, ours))
            self.budget.run("no graphs", 0, partial(self._without_graphs, ours))

    def _started(self, ours: Ours) -> None:
        ours.first_token()
        self.report.start(ours.cold)
        self._warm(ours)

    def _longest(self, ours: Ours, rows: int, context: int) -> None:
        name = f"{rows} rows at {context}"
        work = partial(ours.longest, rows, context, IDLE_STEPS, LISTED)
        kernels = self.budget.run(f"kernels, {name}", self.plan.start / 10, work)
        if kernels is not None:
            self.report.longest(name, IDLE_STEPS, kernels)

    def _cut(self) -> None:
        """Each form of what finds cuts, by itself."""
        rows, vocabulary = self.plan.many[0], self.vocabulary
        for name in cuts.FORMS:
            row = self.report.row(f"cuts, {rows} rows of {vocabulary}, top-p, in {name}", "ms")
            work = partial(cuts.milliseconds, name, rows, vocabulary, self.target.device)
            self.figure(row, OURS, 0, work)

    def _cut_in_triton(self, ours: Ours) -> None:
        """What top-p costs in a step by the form that does not serve yet."""
        rows, context = self.plan.many
        ours.use_cuts("triton")
        ours.decode(rows, context, 2, **SAMPLING["top-p"])
        row = self.decodes(rows, context, ", top-p, cuts in triton")
        work = partial(_decode, ours, rows, context, self.plan.steps, **SAMPLING["top-p"])
        self.figure(row, ours.name, 0, work)

    def _without_graphs(self, ours: Ours) -> None:
        """The last figure of an engine, whose graphs are gone then."""
        rows, context = self.plan.few
        ours.drop_graphs()
        ours.decode(rows, context, 2)
        row = self.decodes(rows, context, ", no graphs")
        self.report.add(row, ours.name, _decode(ours, rows, context, self.plan.steps))

    def in_turns(self) -> None:
        with self._ours(self.plan.sizes(self.plan.cases)) as ours:
            self._started(ours)
            self._round([ours])
            if not self.brief:
                self._idle(ours)
                for name in SAMPLING:
                    self._sampled(name, ours, None)
            side = self.budget.run("transformers", self.plan.start, self._theirs)
            if side is None:
                return
            for _ in range(self.plan.rounds):
                self._round([ours, side])
            if not self.brief:
                self._idle(side)
            side.close()
            for name in () if self.brief else SAMPLING:
                needs = self.plan.start / 2
                self.budget.run(
                    f"sampling, {name}", needs, partial(self._sampled, name, ours, side.model)
                )

    def _warm(self, ours: Ours) -> None:
        """What compiles, compiles before the first round."""
        for rows, context in self.plan.cases:
            ours.decode(rows, context, 2)
        for params in () if self.brief else SAMPLING.values():
            ours.decode(*self.plan.few, 2, **params)

    def _theirs(self) -> Theirs:
        model, sizes = self._model(), self.plan.sizes(self.plan.cases)
        rows, context = self.plan.cases[:2][-1]
        tried = theirs.candidates(self.compiled)
        name, said = theirs.best(model, sizes, rows, context, 8, tried)
        more = "" if self.compiled else " torch.compile was not tried (--compile)."
        self.report.note(
            f"transformers' settings, the fastest of those that run, {name}: {said}.{more}"
        )
        self.their_settings = tried[name]
        return Theirs(model, sizes, self.their_settings)

    def _round(self, sides: Sequence[Ours | Theirs]) -> None:
        """The cases that tell most first."""
        steps, needs = self.plan.steps, self.plan.start / 20
        cases = self.plan.cases
        for rows, context in (*cases[1:3], cases[0], *cases[3:]):
            row = self.decodes(rows, context)
            for side in sides:
                self.figure(row, side.name, needs, partial(_decode, side, rows, context, steps))
        for side in () if self.brief else sides:
            self.figure(self.prefills(), side.name, needs, partial(self._prefill, side))

    def _prefill(self, side: Ours | Theirs) -> float:
        """TFLOP/s."""
        prompts, length = self.plan.prompts
        return self.work.prefill_operations(prompts, length) / 1e12 / side.prefill(prompts, length)

    def _idle(self, side: Ours | Theirs) -> None:
        for rows, context in self.plan.cases[:3]:
            row = self.report.row(f"device idle, {rows} rows at {context}", "% of the time")
            work = partial(_idle, side, rows, context)
            self.figure(row, side.name, self.plan.start / 10, work)

    def _sampled(self, name: str, ours: Ours, model: Any) -> None:
        """Ours, in turns with a manager of transformers where ``model`` is one: it samples all
        requests in one way.
        """
        case, steps, needs = self.plan.many, self.plan.steps, self.plan.start / 20
        row = self.decodes(*case, f", {name}")
        with ExitStack() as stack:
            side = None if model is None else self._their_sampler(name, model, stack)
            for _ in range(1 if model is None else self.plan.rounds):
                work = partial(_decode, ours, *case, steps, **SAMPLING[name])
                self.figure(row, ours.name, needs, work)
                if side is not None:
                    self.figure(row, side.name, needs, partial(_decode, side, *case, steps))

    def _their_sampler(self, name: str, model: Any, stack: ExitStack) -> Theirs:
        case = self.plan.many
        sizes = self.plan.sizes((case,))
        side = Theirs(model, sizes, self.their_settings, **THEIR_SAMPLING[name])
        stack.callback(side.close)
        side.decode(*case, 2)
        return side

    def crowd(self) -> None:
        """Ours and then theirs: both caches do not fit beside both copies of the weights."""
        rows, context = self.plan.crowd
        sizes, row = self.plan.sizes((self.plan.crowd,)), self.decodes(rows, context)
        work = rows, context, self.plan.steps
        with self._ours(sizes) as ours:
            ours.decode(rows, context, 2)
            for _ in range(2):
                self.figure(row, ours.name, 0, partial(_decode, ours, *work))
        self.figure(row, theirs.NAME, self.plan.start / 2, lambda: self._their_crowd(*work))

    def _their_crowd(self, rows: int, context: int, steps: int) -> float:
        side = Theirs(self._model(), self.plan.sizes((self.plan.crowd,)), self.their_settings)
        try:
            side.decode(rows, context, 2)
            return _decode(side, rows, context, steps)
        finally:
            side.close()

    def _model(self) -> Any:
        """transformers' own."""
        target = self.target
        return shapes.make(target.name, target.dtype, target.device, "sdpa")

    def variant(self, name: str, settings: Mapping[str, Any]) -> None:
        cases = self.plan.few, self.plan.many
        with self._ours(self.plan.sizes(cases), **settings) as ours:
            for rows, context in cases:
                ours.decode(rows, context, 2)
                row = self.decodes(rows, context, f", {name}")
                for _ in range(self.plan.rounds):
                    work = partial(_decode, ours, rows, context, self.plan.steps)
                    self.figure(row, ours.name, 0, work)

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
        self.report.note(f"vLLM {answer['version']}, decodes by itself: {said}.")

    @contextmanager
    def _ours(self, sizes: Sizes, **settings: Any) -> Iterator[Ours]:
        ours = Ours(self.target, sizes, **settings)
        try:
            yield ours
        finally:
            ours.close()


def _decode(side: Ours | Theirs, rows: int, context: int, steps: int, **params: Any) -> float:
    """Milliseconds a step."""
    return statistics.median(side.decode(rows, context, steps, **params))


def _idle(side: Ours | Theirs, rows: int, context: int) -> float:
    """Percent of the time."""
    return 100 * side.idle(rows, context, IDLE_STEPS)


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
    parser.add_argument("--ours-only", action="store_true", help="measure no other engine")
    parser.add_argument(
        "--only-cases",
        type=_case,
        nargs="+",
        metavar="ROWSxCONTEXT",
        help="measure these decodes, and nothing else",
    )
    parser.add_argument("--rounds", type=int, help="turns of both sides")
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help="a setting of our engine: kernels=flashinfer",
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file at the end")
    parser.add_argument("--lines", type=Path, help="append each figure to this file at once")
    parser.add_argument("--svg", type=Path, help="draw them to this file")
    parser.add_argument(
        "--folder", type=Path, help="for the directory without weights; default: a temporary one"
    )
    return parser.parse_args()


def _case(text: str) -> tuple[int, int]:
    rows, _, context = text.partition("x")
    return int(rows), int(context)


def _setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not KNOB=VALUE")
    return name.replace("-", "_"), value


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
    report = Report(device_name(device), given.model, str(dtype).removeprefix("torch."))
    report.figures = given.lines
    # What is left over is for ending and writing.
    budget = Budget(given.minutes * 60 - 45)
    report.left_out = budget.left_out
    budget.tell = report.leave_out
    more = {"compiled": given.compile, "ours_only": given.ours_only}
    plan = PLANS[given.model]
    if given.only_cases:
        plan, more["brief"] = plan._replace(cases=tuple(given.only_cases)), True
    if given.rounds is not None:
        plan = plan._replace(rounds=given.rounds)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        target = Target(given.model, folder, dtype, device, dict(given.set))
        try:
            Run(target, plan, report, budget, **more).all(given.vllm)
        finally:  # an interrupted run has figures too
            write(report, given)


if __name__ == "__main__":
    main()
