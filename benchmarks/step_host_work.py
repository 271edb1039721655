"""The host's work for one step of a GPU's engine, without a device: milliseconds of CPU time of the
one thread that does it.

What the device would do is done on tensors without values (torch's "meta" device), so that only the
calls are counted. Two cases:

- mixed: decodes of a long context, most of it one shared prefix, beside one chunk of a prompt. The
  sequence table, the batch, attention's plan (flashinfer's rows) and, in brackets, for a split
  model the message to the other ranks and what one of them adds to its tables.
- decodes: the whole step of the engine (plan, commit, update, events, metrics) and the table; in
  brackets attention's plan, which is mostly calls of the device.

Targets: 256 rows of 131,072 tokens with a prompt ≤ 10 ms; 1,024 rows of 8,192 tokens ≤ 8 ms.
Run: .venv/bin/python benchmarks/step_host_work.py
"""

import argparse
import gc
import statistics
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from fairlead_kernels.interface.attention import DecodeRows
from fairlead_kernels.packages.flashinfer_plan import decode_rows, paged_rows
from fairlead_runtime.device.model.batch import BatchBuilder
from fairlead_runtime.device.model.block_tables import DeviceTables
from fairlead_runtime.device.ranks import rank_messages
from fairlead_runtime.device.sampling.sequence_table import SequenceTable
from fairlead_runtime.engine.engine import Bounds, Engine
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling import Limits, Result, Scheduler
from fairlead_runtime.scheduling.plan import Row, Work
from fairlead_runtime.serving.measurements import RequestMetrics
from fairlead_runtime.sizing.groups import LayerGroup, group_layers

SIZE = 16  # tokens of a block
GROUPS = (LayerGroup(0, None, (0,)),)
META = torch.device("meta")
WARM_UP = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps: int = parser.parse_args().steps
    print("median (p5 .. p95) ms of CPU time a step")
    for rows, context in ((256, 8192), (1024, 8192), (256, 131_072)):
        report(f"mixed, {rows} rows x {context}", mixed(rows, context, steps))
    for rows in (256, 1024):
        report(f"decodes, {rows} rows x 8192", decodes(rows, 8192, steps))


def report(name: str, times: dict[str, list[float]]) -> None:
    for part, values in times.items():
        cuts = statistics.quantiles(values[WARM_UP:], n=20)
        median = statistics.median(values[WARM_UP:])
        print(f"{name:<26} {part:<22} {median:7.2f} ({cuts[0]:.2f} .. {cuts[-1]:.2f})")


class Clock:
    """Milliseconds of the parts of each step; ``in all`` of those without a bracket."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._sum = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        spent = (time.thread_time() - began) * 1e3
        self.times.setdefault(name, []).append(spent)
        self._sum += 0 if name.startswith("(") else spent

    def end_step(self) -> None:
        self.times.setdefault("in all", []).append(self._sum)
        self._sum = 0.0


def table_of(rows: int, context: int) -> SequenceTable:
    return SequenceTable(
        GROUPS,
        SIZE,
        sequences=rows,
        blocks=-(-2 * context // SIZE),
        listed=64,
        padding_unit=0,
        device=META,
    )


def mixed(rows: int, context: int, steps: int) -> dict[str, list[float]]:
    """Decodes that follow from a step in flight beside a prompt of chunks, which begins again."""
    tokens, shared = array("i", bytes(4 * context)), list(range(context // SIZE))
    sequences = []
    for number in range(rows):
        # Lengths differ, so that blocks fill up at different steps.
        own = tokens[: context - number % SIZE]
        sequence = Sequence(number, Request(f"{number}", own, SamplingParams(), 1), 0, own)
        sequence.tables = [shared[:]]
        sequences.append(sequence)
    table, index = table_of(rows, context), torch.zeros(rows, dtype=torch.int64, device=META)
    tables = DeviceTables(GROUPS, SIZE, table.tables)
    builder = BatchBuilder(GROUPS, SIZE, tables=tables, rows=table.rows)
    other = DeviceTables(GROUPS, SIZE, torch.empty_like(table.tables))
    *decoding, prompt = sequences
    clock, chunk = Clock(), 512
    gc.collect()
    gc.freeze()
    for step in range(WARM_UP + steps):
        start = step * chunk % (context - 2 * chunk)
        batch_rows = [Row(prompt, start, chunk, samples=False)]
        if not start:
            prompt.preemptions += 1
        prompt.tables = [shared[: -(-(start + chunk) // SIZE)]]
        for sequence in decoding:
            if sequence.length >= SIZE * len(sequence.tables[0]):
                sequence.tables[0].append(step)
            batch_rows.append(Row(sequence, sequence.length - 1, 1, samples=True))
        with clock.part("sequence table"):
            entered = table.enter(batch_rows, index)
        with clock.part("batch"):
            batch = builder.build(batch_rows, ahead=True, growth=entered.growth)
        with clock.part("attention's plan"):
            paged_rows(batch.ragged[0])
        with clock.part("(message to ranks)"):
            rank_messages.forward(batch, None)
        with clock.part("(a rank reads it)"):
            other.write(batch.growth)
        clock.end_step()
        for sequence in decoding:
            sequence.launch(1, samples=True)
    return clock.times


class Device:
    """Gives each row that samples a token at once, and takes no time for it."""

    def copy(self, work: Work) -> None:
        pass

    def execute(self, work: Work) -> Mapping[int, Result]:
        return dict.fromkeys((row.sequence.id for row in work.rows if row.samples), Result(5))


def decodes(rows: int, context: int, steps: int) -> dict[str, list[float]]:
    """Decodes of one context, of which all but the last blocks are one shared prefix."""
    output = WARM_UP + steps + 64
    limits = Limits(
        policy="fifo",
        max_batch_tokens=8192,
        max_requests=rows,
        safety_margin=0.0,
        block_size=SIZE,
        num_blocks=context // SIZE + rows * (output // SIZE + 4),
        max_model_len=context + output,
    )
    scheduler = Scheduler(limits, group_layers([None]))
    engine = Engine(
        lambda: scheduler,
        Device(),
        Bounds.of(limits, max_queue=rows + 1, queue_timeout=1e9),
        now=time.monotonic,
        observer=RequestMetrics(),
    )
    prompt = array("i", bytes(4 * context))
    for number in range(rows):
        own = prompt[: context - number % SIZE]
        engine.submit(
            Request(f"{number}", own, SamplingParams(max_tokens=output), output), bounded=False
        )
    while len(scheduler.running) < rows or not all(s.generated for s in scheduler.running):
        engine.step()
    table, index = table_of(rows, context), torch.zeros(rows, dtype=torch.int64, device=META)
    clock = Clock()
    gc.collect()
    gc.freeze()
    for _ in range(WARM_UP + steps):
        with clock.part("engine's step"):
            engine.step()
        batch_rows = [
            Row(sequence, sequence.computed, 1, samples=True) for sequence in scheduler.running
        ]
        for sequence in scheduler.running:  # as the scheduler's commit will do in the next step
            if sequence.computed >= SIZE * len(sequence.tables[0]):
                scheduler.state.cache.grow(sequence, sequence.computed + 1)
        with clock.part("sequence table"):
            entered = table.enter(batch_rows, index)
        kv_lens = torch.from_numpy(entered.lens)
        step = DecodeRows(kv_lens, table.lens(index), table.tables[0], index, SIZE, None)
        with clock.part("(attention's plan)"):
            decode_rows(step)
        clock.end_step()
        table.advance(index, index, counts=False)
    return clock.times


if __name__ == "__main__":
    main()
