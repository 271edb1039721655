"""transformers' continuous batching on the same shape, in the same process."""

import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from benchmarks.gpu.bounds import idle, release, wait
from benchmarks.gpu.sizes import STEP, WARM, Sizes, new_tokens

NAME = "transformers"
PAGE = 256  # tokens of its blocks, the default
# Seconds for the first result: of many long prompts it comes once all of them are computed, and
# what is compiled is compiled before.
PATIENCE = 240
COMPILING = 600


def candidates(level: int) -> dict[str, dict[str, Any]]:
    """Its settings, of which the fastest are taken: what it picks by itself, all that it has but
    torch.compile, and with a ``level`` from 1 to 3 that too.
    """
    graphs = {"use_cuda_graph": True, "use_async_batching": True}
    found: dict[str, dict[str, Any]] = {"its own choice": {}, "graphs and asynchronous": graphs}
    if level:
        found[f"compiled at level {level}"] = {**graphs, "default_compile_level": level}
    return found


class Theirs:
    """A running manager. ``sampled``: settings of transformers' GenerationConfig."""

    name = NAME

    def __init__(
        self, model: Any, sizes: Sizes, settings: Mapping[str, Any], **sampled: Any
    ) -> None:
        self.model = model
        self.device: torch.device = model.device
        self._random = random.Random(0)
        self._vocabulary = int(model.config.vocab_size)
        self._patience = COMPILING if settings.get("default_compile_level") else PATIENCE
        generation = transformers.GenerationConfig(
            **{"do_sample": bool(sampled), "eos_token_id": -1, "pad_token_id": 0, **sampled}
        )
        release(self.device)
        config = transformers.ContinuousBatchingConfig(
            num_blocks=sizes.blocks(PAGE),
            max_batch_tokens=max(STEP, sizes.rows),
            max_requests_per_batch=sizes.rows,
            **settings,
        )
        if settings.get("default_compile_level"):
            torch.compiler.reset()  # what other sizes have left
        self._stack = ExitStack()
        self._manager = self._stack.enter_context(
            model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=config
            )
        )

    @property
    def attention(self) -> str:
        """Which attention it runs on: it takes flash attention where that is installed."""
        return str(self.model.config._attn_implementation)  # noqa: SLF001 - it has no other name

    def close(self) -> None:
        self._stack.close()

    def decode(self, rows: int, context: int, steps: int, **_: Any) -> list[float]:
        """Milliseconds of each step in which all rows decode, at least ``steps`` of them. Its
        requests sample as the manager was told.
        """
        results = self._all(rows, context, new_tokens(rows, context, steps))
        times = [result.timestamps for result in results]
        return steps_together(times, steps)

    def idle(self, rows: int, context: int, steps: int) -> float:
        """The share of the time of ``steps`` decodes in which the device computes nothing."""
        new = new_tokens(rows, context, steps)
        waiting = {self._add(context, new) for _ in range(rows - 1)}
        # It starts last, and says when: its tokens come one by one.
        last = self._add(context, new, streaming=True)
        self._tokens(last, 1 + WARM, waiting)
        share = idle(self.device, lambda: self._tokens(last, 1 + WARM + steps, waiting))
        if len(waiting) < rows - 1:
            raise RuntimeError(f"only {len(waiting) + 1} of {rows} rows decode to the end")
        self._finished(waiting | {last})
        return share

    def prefill(self, rows: int, length: int) -> float:
        """Seconds until ``rows`` prompts of ``length`` tokens have their first token."""
        wait(self.device)
        began = time.perf_counter()
        self._all(rows, length, 1)
        return time.perf_counter() - began

    def _all(self, rows: int, length: int, new: int) -> list[Any]:
        return self._finished({self._add(length, new) for _ in range(rows)})

    def _add(self, length: int, new: int, **more: Any) -> str:
        prompt = [self._random.randrange(self._vocabulary) for _ in range(length)]
        added: str = self._manager.add_request(
            prompt, max_new_tokens=new, record_timestamps=True, eos_token_id=-1, **more
        )
        return added

    def _result(self) -> Any:
        result = self._manager.get_result(timeout=self._patience)
        if result is None:
            raise RuntimeError(f"transformers' manager gives no result for {self._patience} s")
        if result.error:
            raise RuntimeError(result.error)
        return result

    def _finished(self, ids: set[str]) -> list[Any]:
        found: list[Any] = []
        while len(found) < len(ids):
            result = self._result()
            if result.is_finished() and result.request_id in ids:
                found.append(result)
        return found

    def _tokens(self, streams: str, count: int, others: set[str]) -> None:
        """Wait for so many tokens of the request that ``streams``; drop what finishes of others."""
        while True:
            result = self._result()
            if result.request_id != streams:
                others.discard(result.request_id)
            elif len(result.generated_tokens) >= count:
                return


def steps_together(times: Sequence[Sequence[float]], steps: int) -> list[float]:
    """Milliseconds between the tokens of one sequence while all sequences decode, without the first
    few. ``times``: seconds at which each sequence's tokens came. Raises RuntimeError where fewer
    than ``steps`` are left.
    """
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    inside = [at for at in times[0] if begin <= at <= end][WARM:]
    taken = [(after - before) * 1e3 for before, after in itertools.pairwise(inside)]
    if len(taken) < steps:
        raise RuntimeError(f"all rows decode together in {len(taken)} steps of {steps}")
    return taken[:steps]


def best(
    model: Any,
    sizes: Sizes,
    rows: int,
    context: int,
    steps: int,
    tried: Mapping[str, Mapping[str, Any]],
) -> tuple[str, str]:
    """The name of the fastest of the settings ``tried`` at ``rows``, and what each took or why it
    did not run. Raises RuntimeError where none runs.
    """
    found, said = {}, []
    for name, settings in tried.items():
        try:
            side = Theirs(model, sizes, settings)
            try:
                side.decode(rows, context, 2)
                found[name] = statistics.median(side.decode(rows, context, steps))
                on = side.attention
            finally:
                side.close()
        except Exception as error:  # noqa: BLE001 - the other settings may run
            said.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        else:
            said.append(f"{name}: {found[name]:.2f} ms on {on}")
    if not found:
        raise RuntimeError("; ".join(said))
    return min(found, key=lambda name: found[name]), "; ".join(said)
