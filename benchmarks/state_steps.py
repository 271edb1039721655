"""Steps of a model whose layers keep states, on random weights: with its mixers' operations in C++
and in transformers' own code, in turns in one process. With ``--products`` its matrix products, in
C++ and in torch, are compared instead, the operations on states being in C++ in both.

Times are those that one thread computes, so that what else the machine does counts little: the
least of all turns. A context is only counted, not computed: what its cache holds changes no time.

    python -m benchmarks.state_steps [--family nemotron_h] [--dtype bfloat16] [--turns 5]
        [--products [--int8]]

``--products`` packs bfloat16 weights on every processor; ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI``
makes torch's products those of one that does not multiply bfloat16.
"""

import argparse
import time
from collections.abc import Callable

import torch
from benchmarks.models import STATES_ALONE, with_states
from transformers import CONFIG_MAPPING

from fairlead_kernels.cpu import cpu_operations, library
from fairlead_kernels.cpu.cpu_states import CpuStates
from fairlead_kernels.plain.torch_attention import TorchAttention
from fairlead_runtime.device.conversion.fusion import fuse, quantize_weights
from fairlead_runtime.device.conversion.pack_states import pack_states
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.batch import BatchBuilder
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.model.state_layers import StateMixer, StateStep
from fairlead_runtime.models import families, text_model
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.plan import Row

BLOCK, UNITS = 256, 400


class Steps:
    """A model and a cache, in which every sequence takes units in turns: nothing is read again."""

    def __init__(self, model: PagedModel) -> None:
        self.model = model
        self.cache = CacheStorage(
            model.groups,
            model.cache_heads,
            units=UNITS,
            block_size=BLOCK,
            device=model.device,
            states=model.state_layout,
        )
        self.builder = BatchBuilder(model.groups, BLOCK)
        self.attention = TorchAttention(model.heads, model.device)

    def step(self, rows: list[tuple[int, int]]) -> Callable[[], object]:
        """A step of rows of so many tokens behind so many others."""
        assert self.cache.states is not None
        own, batch = self.cache.states.count, list[Row]()
        taken = 0
        for index, (context, count) in enumerate(rows):
            tokens = [7] * (context + count)
            request = Request(str(index), tuple(tokens), SamplingParams(), max_tokens=1)
            sequence = Sequence(index, request, 0, tokens)
            units = [(taken + i) % UNITS for i in range(2 * own)]
            taken += 2 * own
            blocks = -(-len(tokens) // BLOCK)
            sequence.tables = [[i % UNITS for i in range(blocks)] for _ in self.model.groups]
            sequence.states = [units[:own], units[own:]]
            sequence.computed = context
            batch.append(Row(sequence, context, count, True))
        packed = self.builder.build(batch)
        return lambda: self.model.forward(packed, self.cache, self.attention)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds that a step computes, and those of them in mixers."""
    inside, plain = [0.0], StateStep.run

    def measured(
        self: StateStep, layer: int, mixer: StateMixer, hidden: torch.Tensor
    ) -> torch.Tensor:
        began = time.thread_time()
        out = plain(self, layer, mixer, hidden)
        inside[0] += time.thread_time() - began
        return out

    StateStep.run = measured  # type: ignore[method-assign]
    try:
        began = time.thread_time()
        run()
        return time.thread_time() - began, inside[0]
    finally:
        StateStep.run = plain  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of a model whose layers keep states.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--family", choices=tuple(STATES_ALONE), default="qwen3_5_text")
    parser.add_argument("--layers", type=int, default=24, help="the first of its layers")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--products", action="store_true", help="compare products")
    parser.add_argument("--int8", action="store_true", help="of weights that are rounded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    operations = CpuStates(library.load())

    def prepared(*, products: bool) -> Steps:
        torch.manual_seed(0)
        config = CONFIG_MAPPING[options.family](**with_states(options.family, options.layers))
        plain = text_model.class_of(config)._from_config(  # noqa: SLF001 - transformers' only way
            config, dtype=getattr(torch, options.dtype), attn_implementation="eager"
        )
        model = PagedModel(plain, families.check(config))
        if options.int8:
            quantize_weights(model, "int8")
        states = pack_states(model, operations)
        packed = f", {fuse(model, cpu_operations.load())}" if products else ""
        print(f"{options.dtype}: {model.weight_bytes / 2**20:.0f} MiB{states}{packed}")
        return Steps(model)

    plain_steps = prepared(products=False)
    ways = {"C++": prepared(products=True) if options.products else plain_steps}
    ways["torch"] = plain_steps
    shapes = {
        "one request": [(100, 1)],
        "32 decodes": [(100, 1)] * 32,
        "28 decodes and chunks of 128, 64, 33 and 9": [(100, 1)] * 28
        + [(0, 128), (100, 64), (0, 33), (50, 9)],
        "one request behind 1,000 tokens": [(1000, 1)],
        "one request behind 32,000 tokens": [(32000, 1)],
    }
    for name, rows in shapes.items():
        runs = {way: steps.step(rows) for way, steps in ways.items()}
        best: dict[str, tuple[float, float]] = {}
        for _ in range(options.turns):
            for way, run in runs.items():
                model = ways[way].model
                for layer, mixer in model.mixers.items():
                    if options.products or way == "C++":
                        mixer.pack(model.states[layer], operations)
                    else:
                        mixer.unpack()
                best[way] = min(best.get(way, (9e9, 9e9)), timed(run))
        tokens = sum(count for _, count in rows)
        for way, (whole, inside) in best.items():
            print(
                f"{name}, {way}: {1e3 * whole:.1f} ms, in mixers {1e3 * inside:.1f} ms, "
                f"{tokens / whole:.1f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
