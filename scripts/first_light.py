"""Look at a GPU for the first time, within minutes that are counted to the second.

    python3 scripts/gpu_python.py --wheels .whl -- scripts/first_light.py --out FOLDER

Tiers run one after the other, each as processes of their own that are ended at the tier's limit: a
tier that fails, hangs or dies never stops the next one. FOLDER has a line of JSON for each test and
figure in results.jsonl, as soon as it is known, and the whole output of each tier in TIER.log. The
table comes last. docs/gpu.md has the plan, the commands, and what to make of the results.

``--device cpu`` rehearses all of it in a minute, in small: what has no form for a CPU says so.

Exit code: 0 if all that ran passed, 1 if something failed or did not run for want of time, 2 if
torch, transformers or the GPU is missing. Needs only the standard library.
"""

import argparse
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.result_lines import FILE, TIER, append  # noqa: E402 - found by the line above

RESULTS = "results.jsonl"
GRACE = 3.0  # seconds to write what is known, between the signal that asks and the one that ends
LEAST = 10.0  # seconds without which no tier starts
ESSENTIAL = ("torch", "transformers", "GPU")  # facts: without one nothing else can be true
GRAPHS = re.compile(r"graph|captured|-on\]")  # in the name of a test that needs CUDA graphs
CUTS = "cuts_in_triton"  # in the name of a test of what no tier runs on: it is only measured
SOAK = 45  # seconds of load: starting and the last round take some of the tier's
TIME = "its time was over"
BENCH, FACTS = ("-m", "benchmarks.gpu"), ("-m", "benchmarks.gpu.facts")
DECODES, MODELS, ENGINE, LAYERS, FLASHINFER, TRITON, OFFLOAD, SOAKED = (
    f"tests/gpu/test_{name}_on_gpu.py"
    for name in (
        *("decodes", "models", "engine", "layers", "flashinfer", "triton_attention", "offload"),
        "soak",
    )
)


class Job(NamedTuple):
    """One process: a program, or pytest with ``tests``, whose names are known beforehand."""

    program: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        if not self.tests:
            return [sys.executable, *self.program]
        # A signal does not end a test that waits for a GPU that hangs: a thread ends its process.
        limit = "--timeout=90", "--timeout-method=thread"
        return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *limit, *self.tests]


class Tier(NamedTuple):
    """``seconds``: its limit; infinite: it has all that is left. ``keeps``: seconds that it leaves
    to the tiers after it. What reads the whole card is a tier with a single job.
    """

    name: str
    seconds: float
    keeps: float
    jobs: Callable[["Run"], list[Job]]


def tests_of(file: str, name: str, *parameters: str) -> tuple[str, ...]:
    """The names of a test: with each of these parameters, without any if there are none."""
    return tuple(f"{file}::{name}[{each}]" for each in parameters) or (f"{file}::{name}",)


def kernel_jobs(_run: "Run") -> list[Job]:
    """Each kernel and wrapper, asked for by its name, against its reference."""
    types = "float32", "bfloat16", "float16"
    typed, with_fp8 = ([f"{dtype}-{cache}" for dtype in types] for cache in ("auto", "fp8"))
    rounded = [f"{dtype}-triton" for dtype in types]
    modules = "bfloat16-128", "bfloat16-128-window", "bfloat16-64", "bfloat16-64-window"
    more = "bfloat16-64-softcap", "bfloat16-64-window-softcap", "bfloat16-64-sinks"
    rest = "bfloat16-64-window-sinks", "float16-64", "bfloat16-64-fp8_cache"
    steps = "test_random_steps_match_the_definition"
    carried = "test_a_carried_module_is_proven"
    cut = "test_cuts_in_triton_are_those_of_torch"
    cases = "False-500-12", "False-128256-70", "True-500-12", "True-128256-70"
    late = "test_every_byte_comes_back_however_late_a_stream_is"
    return [
        Job(
            tests=(
                *tests_of(LAYERS, "test_triton_is_proven_and_taken", *typed),
                *tests_of(LAYERS, "test_keys_are_rounded_to_fp8_as_on_a_cpu", *rounded),
            )
        ),
        Job(
            tests=(
                *tests_of(TRITON, "test_it_is_proven_in_each_type", *types),
                *tests_of(TRITON, "test_a_captured_step_follows_the_newest_plan"),
                *tests_of(TRITON, "test_auto_takes_it_for_float32"),
            )
        ),
        Job(
            tests=tests_of(
                TRITON,
                steps,
                "float32-32x8x128-None-plain",
                "float32-71x1x64-128-plain",
                "bfloat16-71x1x64-1-sinks and fp8 cache",
                "bfloat16-9x9x80-None-softcap and sinks",
                "float16-71x1x64-1-softcap and sinks",
            )
        ),
        Job(tests=tests_of(FLASHINFER, carried, *modules)),
        Job(tests=tests_of(FLASHINFER, carried, *more, *rest)),
        Job(
            tests=(
                *tests_of(DECODES, "test_the_noise_of_a_gpu_is_that_of_a_cpu_within_two_ulp"),
                *tests_of(DECODES, "test_draws_are_those_of_a_cpu", "500", "128256"),
                *tests_of(LAYERS, "test_triton_is_proven_and_taken", *with_fp8),
                *tests_of(DECODES, cut, *cases),
                *tests_of(DECODES, "test_a_cuda_graph_holds_cuts_in_triton"),
            )
        ),
        Job(
            tests=(
                *tests_of(
                    LAYERS, "test_a_cuda_graph_holds_a_chain_of_operations", "torch", "triton"
                ),
                *tests_of(LAYERS, "test_products_of_8_bit_floats_are_proven"),
            )
        ),
        Job(
            tests=(
                *tests_of(OFFLOAD, late, "side-1", "either-3"),
                *tests_of(OFFLOAD, "test_neither_the_host_nor_a_step_waits_for_what_leaves"),
                *tests_of(OFFLOAD, "test_host_memory_is_pinned_in_its_exact_size_and_given_back"),
            )
        ),
    ]


def token_jobs(_run: "Run") -> list[Job]:
    """The engine: texts that are equal, or as near as rounding lets them be; what tells less comes
    last in each process.
    """
    however = "test_greedy_text_in_float32_is_transformers_however_steps_are_run"
    close = "test_log_probabilities_in_16_bits_are_close_to_float32"
    ways = "torch", "eager", "graphs", "graphs-ahead"
    graphs = "test_graphs_give_the_tokens_of_steps_that_are_not_captured"
    ahead = "test_steps_ahead_give_the_tokens_of_steps_that_wait"
    launch = "test_a_launch_waits_for_nothing_and_comes_before_the_last_tokens"
    preempted = "test_greedy_output_equals_transformers_under_preemption"
    sampled = "test_all_ways_to_sample_draw_the_same_from_captured_logits"
    run = "test_log_probabilities_do_not_depend_on_how_steps_are_run"
    flight = "test_steps_in_flight_and_graphs_give_the_same_text_with_and_without_offload"
    return [
        Job(
            tests=(
                *tests_of(MODELS, however, *(f"llama-{way}" for way in ways)),
                *tests_of(MODELS, close, "llama-auto-float16"),
            )
        ),
        Job(tests=tests_of(MODELS, however, *(f"gemma2-{way}" for way in ways))),
        Job(
            tests=(
                *tests_of(DECODES, graphs, "llama"),
                *tests_of(DECODES, ahead, "llama-off", "llama-on"),
                *tests_of(DECODES, sampled, "llama-1.0"),
            )
        ),
        Job(
            tests=(
                *tests_of(DECODES, graphs, "mistral"),
                *tests_of(DECODES, ahead, "mistral-on"),
                *tests_of(MODELS, run, "off-off", "off-on", "on-off", "on-on"),
            )
        ),
        Job(
            tests=(
                *tests_of(DECODES, graphs, "gpt_oss"),
                *tests_of(DECODES, ahead, "gpt_oss-on"),
                *tests_of(OFFLOAD, flight),
            )
        ),
        Job(
            tests=(
                *tests_of(DECODES, "test_a_decode_waits_once", "llama-0"),
                *tests_of(DECODES, launch, "llama"),
                *tests_of(ENGINE, preempted, "0.01-llama"),
                *tests_of(MODELS, close, "llama-auto-bfloat16"),
            )
        ),
    ]


def fact_jobs(run: "Run") -> list[Job]:
    return [Job((*FACTS, "--device", run.device))]


def speed_jobs(run: "Run") -> list[Job]:
    """Ours alone, all figures by one engine; first without graphs where these failed before."""
    knobs = {"kernels": "flashinfer", "cuda_graphs": "on", "async_batching": "on"}
    if run.device == "cpu":
        knobs = {}
    elif run.without_flashinfer:
        knobs["kernels"] = "auto"
    if run.without_graphs:
        knobs["cuda_graphs"] = "off"
    return [run.bench(["--ours-only"], knobs)]


def again_jobs(run: "Run") -> list[Job]:
    """The tests that failed in the call before, each file in a process of its own."""
    files: dict[str, list[str]] = {}
    for name in run.failures:
        files.setdefault(name.partition("::")[0], []).append(name)
    return [Job(tests=tuple(names)) for names in files.values()]


def peer_jobs(run: "Run") -> list[Job]:
    """transformers' continuous batching beside ours, one round."""
    cases = ["8x1024", "64x1024"] if run.device == "cuda" else ["3x24"]
    return [run.bench(["--only-cases", *cases, "--rounds", "1"], {})]


def soak_jobs(_run: "Run") -> list[Job]:
    return [Job(tests=tests_of(SOAKED, "test_minutes_of_mixed_load_leave_nothing_behind"))]


def quantized_jobs(_run: "Run") -> list[Job]:
    quantized = "test_quantized_weights_are_served_within_their_tolerances"
    return [Job(tests=tests_of(LAYERS, quantized, "llama-int8", "llama-fp8"))]


def fp8_jobs(run: "Run") -> list[Job]:
    """One figure of decoding with weights in fp8, on a CPU in int8."""
    case, form = ("8x1024", "fp8") if run.device == "cuda" else ("3x24", "int8")
    return [run.bench(["--ours-only", "--only-cases", case], {"quantization": form})]


# With two starts of a machine and a margin they are fifteen. A CPU that rehearses may be busy.
MINUTES = {1: 6.1, 2: 3.9}
PATIENCE = {"cuda": 1, "cpu": 4}
CALLS: dict[int, tuple[Tier, ...]] = {
    1: (
        Tier("facts", 40, 0, fact_jobs),
        Tier("kernels", 60, 170, kernel_jobs),
        # The largest batch and sampling, which are the last figures of the speed, go first where
        # time is short, then the last tests here.
        Tier("tokens", 75, 130, token_jobs),
        Tier("speed", 190, 0, speed_jobs),
    ),
    2: (
        Tier("again", 50, 0, again_jobs),
        Tier("peer", 75, 0, peer_jobs),
        Tier("soak", 85, 0, soak_jobs),
        Tier("quantized", 20, 0, quantized_jobs),
        Tier("fp8", math.inf, 0, fp8_jobs),
    ),
}


class Run:
    """One call. ``ends``: the time of ``time.monotonic`` at which it must be over; ``failures``:
    tests that failed in the call before.
    """

    def __init__(self, out: Path, device: str, ends: float, failures: Sequence[str] = ()) -> None:
        self.out, self.device, self.ends, self.failures = out, device, ends, failures
        self.results = out / RESULTS
        self.without_flashinfer = self.without_graphs = False
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def bench(self, more: Iterable[str], knobs: Mapping[str, str]) -> Job:
        """The benchmark, for the time that is left: it leaves out by itself what does not fit."""
        small = () if self.device == "cuda" else ("--model", "tiny")
        sets = itertools.chain.from_iterable(("--set", f"{k}={v}") for k, v in knobs.items())
        # It keeps 45 seconds for writing what is written here at once.
        minutes = f"{(self.left + 45) / 60:.2f}"
        command = (*BENCH, "--device", self.device, *small, "--minutes", minutes)
        return Job((*command, *more, *sets))

    def all(self, tiers: Iterable[Tier]) -> int:
        """Run these tiers. Returns the exit code."""
        self.out.mkdir(parents=True, exist_ok=True)
        os.environ[FILE] = str(self.results)
        try:
            for tier in tiers:
                if not self._run(tier):
                    return 2
        finally:
            self.end()
            print("\n".join(table(self.lines())), flush=True)
        return int(any(line["ok"] is False or TIME in line["error"] for line in self.lines()))

    def lines(self, tier: str = "") -> list[dict[str, Any]]:
        """What was written until now, of one tier if it is named."""
        if not self.results.exists():
            return []
        every = [json.loads(line) for line in self.results.read_text().splitlines()]
        return [line for line in every if tier in ("", line["tier"])]

    def end(self) -> None:
        """End all processes, with what they started."""
        for process in self._processes:
            if process.poll() is None:
                _signal(process, signal.SIGKILL)

    def _run(self, tier: Tier) -> bool:
        """Run one tier; whether others make sense after it."""
        os.environ[TIER] = tier.name
        limit = min(tier.seconds * PATIENCE[self.device], self.left - tier.keeps)
        jobs = self._merged(tier.jobs(self))
        print(f"{tier.name}: {len(jobs)} processes, {max(0.0, limit):.0f} s", flush=True)
        if not jobs:
            append(tier.name, ok=None, error="there is nothing to do")
        elif limit < LEAST:
            append(tier.name, ok=None, error=f"{TIME}: {max(0.0, limit):.0f} s are left for it")
        else:
            began = time.monotonic()
            with (self.out / f"{tier.name}.log").open("a") as log:
                self._run_all(tier, jobs, log, began + limit)
            print(f"{tier.name}: {time.monotonic() - began:.0f} s", flush=True)
        return self._heed(tier.name)

    def _merged(self, jobs: Sequence[Job]) -> list[Job]:
        """On a CPU, which is small, all tests in one process."""
        if self.device == "cuda":
            return list(jobs)
        tests = tuple(name for job in jobs for name in job.tests)
        others = [job for job in jobs if not job.tests]
        return [*([Job(tests=tests)] if tests else []), *others]

    def _run_all(self, tier: Tier, jobs: Sequence[Job], log: IO[str], ends: float) -> None:
        """Side by side, until all have ended or are ended."""
        environ = self._environ(side_by_side=len(jobs) > 1)
        lock, readers = threading.Lock(), []
        running: list[tuple[Job, subprocess.Popen[str]]] = []
        for number, job in enumerate(jobs):
            process = subprocess.Popen(
                job.command,
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._processes.append(process)
            running.append((job, process))
            reader = threading.Thread(target=_copy, args=(process, number, log, lock), daemon=True)
            reader.start()
            readers.append(reader)
        late = [each for each in running if not _ends_by(each[1], ends - GRACE)]
        for _, process in late:
            _signal(process, signal.SIGINT)  # which lets it say where it was
        for _, process in late:
            _ends_by(process, ends)
        for job, process in running:
            _signal(process, signal.SIGKILL)  # what it started may outlive it
            code = process.wait()
            self._note(tier, job, TIME if (job, process) in late else f"ended with {code}")
        for reader in readers:
            reader.join(1)

    def _note(self, tier: Tier, job: Job, reason: str) -> None:
        """Write a line for each test of a job that has none, or for a program that did not end
        well.
        """
        ok = None if reason == TIME else False
        there = {line["name"] for line in self.lines(tier.name)}
        for name in job.tests:
            if name not in there:
                append(name, ok, error=f"did not run: its process: {reason}")
        if job.program and reason != "ended with 0":
            append(" ".join(job.program), ok, error=f"{reason}: see {tier.name}.log")

    def _environ(self, *, side_by_side: bool) -> dict[str, str]:
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "FAIRLEAD_TEST_DEVICE": self.device}
        environ["FAIRLEAD_SOAK_SECONDS"] = str(SOAK)
        if self.device == "cpu":
            return environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        environ |= {"TRITON_INTERPRET": "0", "FLASHINFER_DISABLE_JIT": "1"}
        if side_by_side:
            environ["OMP_NUM_THREADS"] = "2"
        if self.without_flashinfer:
            environ["FAIRLEAD_TEST_KERNELS"] = "auto"
        else:
            environ["FAIRLEAD_NO_FALLBACK"] = "1"
        return environ

    def _heed(self, tier: str) -> bool:
        """Let what a tier found decide how the next ones run; whether they do at all."""
        failed = [line["name"] for line in self.lines(tier) if line["ok"] is False]
        if tier == "facts" and (lacks := [name for name in ESSENTIAL if name in failed]):
            print(f"nothing else can be true without {', '.join(lacks)}: the run ends", flush=True)
            return False
        failed = [name for name in failed if CUTS not in name]
        if tier == "kernels" and failed and all(FLASHINFER in name for name in failed):
            self.without_flashinfer = True
            print("flashinfer alone failed: the next tiers run on Triton's attention", flush=True)
        if tier == "tokens" and failed and all(GRAPHS.search(name) for name in failed):
            self.without_graphs = True
            print("CUDA graphs alone failed: the next tier runs without them", flush=True)
        return True


def _copy(process: subprocess.Popen[str], number: int, log: IO[str], lock: threading.Lock) -> None:
    """Copy each line of a process's output to the log, with the number of the process before it."""
    assert process.stdout is not None
    for line in process.stdout:
        with lock:
            log.write(f"[{number}] {line}")
            log.flush()


def _ends_by(process: subprocess.Popen[str], ends: float) -> bool:
    try:
        process.wait(max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """To the process and all that it started, some of which may outlive it."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def table(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What was found: counts and seconds by tier, the figures, and what failed or did not run."""
    yield ""
    yield f"{'tier':<10} {'passed':>6} {'failed':>6} {'not run':>7}"
    words = {True: "passed", False: "failed", None: "not run"}
    for tier in dict.fromkeys(line["tier"] for line in lines):
        counts = Counter(words[line["ok"]] for line in lines if line["tier"] == tier)
        yield f"{tier:<10} {counts['passed']:>6} {counts['failed']:>6} {counts['not run']:>7}"
    for line in lines:
        if line["value"] is not None:
            yield f"{line['tier']} {line['name']}: {_figure(line)}"
    for ok in (False, None):
        for line in lines:
            if line["ok"] is ok:
                error = " ".join(line["error"].split())
                yield f"{words[ok].upper()} {line['tier']} {line['name']}: {error[:200]}"


def _figure(line: Mapping[str, Any]) -> str:
    value, bound = line["value"], line.get("bound")
    text = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
    share = "" if not bound else f", {bound:.4g} is the bound"
    side = f" by {line['side']}" if "side" in line else ""
    return f"{text[:300]} {line.get('unit', '')}{side}{share}".rstrip()


def process_age() -> float:
    """Seconds since this process began, as another program perhaps."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="look at a GPU for the first time")
    made.add_argument("--out", type=Path, required=True, help="a folder for what is found")
    made.add_argument("--minutes", type=float, help=f"from this process's start: {MINUTES}")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--call", type=int, choices=tuple(CALLS), default=1)
    made.add_argument(
        "--again", type=Path, help="results.jsonl of the call before, whose failures run again"
    )
    return made


def main() -> int:
    options = parser().parse_args()
    if (options.out / RESULTS).exists():
        parser().error(f"--out: {options.out} has the results of another run: name a new folder")
    minutes = options.minutes or MINUTES[options.call] * PATIENCE[options.device]
    failures: list[str] = []
    if options.again is not None:
        lines = map(json.loads, options.again.read_text().splitlines())
        failures = [x["name"] for x in lines if x["ok"] is False and "::" in x["name"]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ends = time.monotonic() + minutes * 60 - process_age()
    return Run(options.out.resolve(), options.device, ends, failures).all(CALLS[options.call])


if __name__ == "__main__":
    sys.exit(main())
