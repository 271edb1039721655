"""Our engine, driven step by step as the server's thread does, without HTTP and text."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import cuts, shapes
from benchmarks.gpu.bounds import Kernel, idle, longest, release, wait
from benchmarks.gpu.budget import LeftOutError
from benchmarks.gpu.patch import replaced
from benchmarks.gpu.sizes import STEP, WARM, Sizes, new_tokens
from benchmarks.turns import OURS

from fairlead_runtime import LLM, SamplingParams
from fairlead_runtime.build import load_rank
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.device.step.decode_steps import DecodeSteps
from fairlead_runtime.device.warmup.decode_plan import DecodePlan
from fairlead_runtime.models import loading
from fairlead_runtime.outputs import Submission

BLOCK = 16


@dataclass(frozen=True)
class Target:
    """Which model is measured, where its directory is, and on what."""

    name: str
    folder: Path
    dtype: torch.dtype
    device: torch.device
    settings: Mapping[str, Any] = field(default_factory=dict)


class Ours:
    """One engine. ``cold``: seconds of the parts of its start."""

    name = OURS

    def __init__(
        self, target: Target, sizes: Sizes, *, fused: bool = True, **settings: Any
    ) -> None:
        self.device = target.device
        self.cold: dict[str, float] = {}
        self._random = random.Random(0)
        self._decodes: DecodeSteps | None = None
        settings = {**target.settings, **settings}
        form = settings.pop("cuts", "")
        release(target.device)
        began = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(_timed(self.cold))
            stack.enter_context(self._noting_decodes())
            stack.enter_context(shapes.weights_made_on(target.name, target.dtype, target.device))
            if not fused:
                stack.enter_context(_unfused())
            self._llm = LLM(
                str(target.folder),
                **{
                    "device": target.device.type,
                    "dtype": str(target.dtype).removeprefix("torch."),
                    "block_size": BLOCK,
                    "num_blocks": sizes.blocks(BLOCK),
                    "max_batch_tokens": STEP,
                    "max_requests": sizes.rows,
                    "max_model_len": sizes.longest,
                    "safety_margin": 0.0,
                    "max_memory_percent": 0.95,
                    **settings,
                },
            )
        self.cold["the rest"] = time.perf_counter() - began - sum(self.cold.values())
        try:
            if form:
                self.use_cuts(form)
        except BaseException:
            self.close()  # nobody else can
            raise
        self._vocabulary = self._llm.built_engine.facts.vocab_size

    def close(self) -> None:
        self._llm.shutdown()

    def first_token(self) -> None:
        """Add the seconds of one token for a short prompt, the first that this engine makes."""
        self.cold["first token"] = self.prefill(1, 16)

    def decode(self, rows: int, context: int, steps: int, **params: Any) -> list[float]:
        """Milliseconds of each of ``steps`` decodes of ``rows`` sequences of about ``context``
        tokens, greedy unless ``params`` say else. Raises RuntimeError where a step has not all
        rows.
        """
        with self._decoding(rows, context, steps, {"temperature": 0.0, **params}) as step:
            taken = []
            wait(self.device)
            for _ in range(steps):
                began = time.perf_counter()
                step()
                taken.append((time.perf_counter() - began) * 1e3)
            wait(self.device)
        return taken

    def idle(self, rows: int, context: int, steps: int) -> float:
        """The share of the time of greedy ``steps`` in which the device computes nothing."""
        with self._decoding(rows, context, steps, {"temperature": 0.0}) as step:
            return idle(self.device, lambda: [step() for _ in range(steps)])

    def longest(self, rows: int, context: int, steps: int, count: int) -> list[Kernel]:
        """The ``count`` kernels that take most of the device's time in greedy ``steps``."""
        with self._decoding(rows, context, steps, {"temperature": 0.0}) as step:
            return longest(self.device, lambda: [step() for _ in range(steps)], count)

    def drop_graphs(self) -> None:
        """Replay no graph from now on. Raises LeftOutError where none was captured."""
        if self._decodes is None or not self._decodes.held_nbytes:
            raise LeftOutError("this engine has no graphs")
        self._decodes.drop_graphs()

    def use_cuts(self, name: str) -> None:
        """Find the cuts of filters by the form of that name from now on. Raises LeftOutError where
        this engine samples on the host, NotAvailableError where there is no such form here.
        """
        if self._decodes is None:
            raise LeftOutError("this engine samples on the host")
        self._decodes.use_cuts(cuts.form(name))

    def prefill(self, rows: int, length: int) -> float:
        """Seconds until ``rows`` prompts of ``length`` tokens have their first token."""
        engine, left = self._llm.built_engine.engine, rows
        for _ in range(rows):
            self._submit(length, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        wait(self.device)
        began = time.perf_counter()
        while left:
            left -= sum(event.finish is not None for event in engine.step())
        wait(self.device)
        return time.perf_counter() - began

    @contextmanager
    def _noting_decodes(self) -> Iterator[None]:
        """Inside it ``_decodes`` is what runs the steps of decodes: the last that a start makes."""
        steps = DecodePlan.steps

        def note(plan: DecodePlan, *arguments: Any, **named: Any) -> DecodeSteps | None:
            self._decodes = steps(plan, *arguments, **named)
            return self._decodes

        with replaced(DecodePlan, "steps", note):
            yield

    @contextmanager
    def _decoding(
        self, rows: int, context: int, steps: int, params: dict[str, Any]
    ) -> Iterator[Callable[[], None]]:
        """All rows are prefilled and have decoded some steps; what it yields runs one more."""
        engine = self._llm.built_engine.engine
        most = new_tokens(rows, context, steps)
        wanted = SamplingParams(max_tokens=most, ignore_eos=True, **params)
        ids = [self._submit(context, wanted) for _ in range(rows)]
        started: set[str] = set()
        while len(started) < rows:
            started |= {event.request_id for event in engine.step()}

        def step() -> None:
            events = engine.step()
            if len(events) != rows or any(event.token is None for event in events):
                raise RuntimeError(f"a step has {len(events)} tokens of {rows} rows")

        try:
            for _ in range(WARM):
                engine.step()
            yield step
        finally:
            for one in ids:
                engine.abort(one)
            engine.step()
            while not engine.idle:
                engine.step()

    def _submit(self, length: int, params: SamplingParams) -> str:
        prompt = [self._random.randrange(self._vocabulary) for _ in range(length)]
        parts = self._llm.built_engine
        request = parts.intake.request(Submission(prompt=prompt, params=params))
        parts.engine.submit(request)
        return request.id


# The parts of a start: what they are called, and the functions that the composition root calls.
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("weights, made on the device", loading, "load"),
    ("fusing, kernels, self-test", selftest, "prepare_and_test"),
    ("profile", load_rank, "_profile"),
    ("graphs, measured", DecodePlan, "measure"),
    ("graphs, captured", DecodePlan, "capture"),
)


@contextmanager
def _timed(seconds: dict[str, float]) -> Iterator[None]:
    """Inside it the parts of a start write how long they take."""

    def watched(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return whole(*arguments, **named)
            finally:
                seconds[name] = time.perf_counter() - began

        return run

    with ExitStack() as stack:
        for name, owner, function in PARTS:
            whole = getattr(owner, function)
            stack.enter_context(replaced(owner, function, watched(name, whole)))
        yield


@contextmanager
def _unfused() -> Iterator[None]:
    """Inside it layers keep the model's own code, beside the same attention."""
    pick = selftest._pick  # noqa: SLF001 - no setting parts attention from layers

    def plain(*arguments: Any, **named: Any) -> Any:
        return replace(pick(*arguments, **named), operations=None)

    with replaced(selftest, "_pick", plain):
        yield
