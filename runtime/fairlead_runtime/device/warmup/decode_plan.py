"""How steps of decodes run on this device: from state on it or not, captured or not, launched ahead
or not, and why.

Owns that choice, the measuring of what graphs take before the cache is sized, and their capture at
start, which is shown and ends in time.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from fairlead_kernels.interface.attention import AttentionBackend, DecodeAttention
from fairlead_kernels.interface.not_available import fall_back
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.proof.graph_proof import replay_error, units_of
from fairlead_runtime.device.proof.selftest import TOLERANCE, has_experts
from fairlead_runtime.device.sampling.device_sampler import RowSampler
from fairlead_runtime.device.sampling.sampling_mode import GREEDY, HEAVIEST
from fairlead_runtime.device.step.cuda_graphs import CudaRecorder
from fairlead_runtime.device.step.decode_steps import DecodeSteps
from fairlead_runtime.device.step.graph_cache import GraphCache, Recorder
from fairlead_runtime.models.model_error import first_line
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.graph_sizes import WAYS, step_sizes

log = logging.getLogger("fairlead.decodes")

CAPTURE_SECONDS = 60.0  # graphs that are not captured then are when a step needs them


@dataclass(slots=True)
class DecodePlan:
    """The choice for one model. ``attention`` is None where decodes run as all other steps;
    ``graphs_off_because`` says why no graph is captured, and is empty where some are;
    ``sync_because`` why each step is waited for before the next is launched, and is empty where it
    is not. ``state_on_device``: the device keeps what sampling needs.
    """

    config: EngineConfig
    model: PagedModel
    attention: DecodeAttention | None
    graphs_off_because: str
    new_recorder: Callable[[torch.device], Recorder] = field(default=CudaRecorder)
    # The cache of graphs, once there is one.
    graphs: GraphCache | None = None
    sync_because: str = ""
    state_on_device: bool = True

    @classmethod
    def choose(
        cls, config: EngineConfig, model: PagedModel, attention: AttentionBackend, *, sharded: bool
    ) -> "DecodePlan":
        """Raises ConfigError where graphs or asynchronous steps are asked for and cannot be."""
        on_device: DecodeAttention | None = None
        elsewhere = ""  # why the device keeps nothing between steps; empty where it does
        if model.device.type != "cuda":
            elsewhere = f"the model runs on {model.device.type}"
        elif model.states:  # each step of theirs is packed on the host, whatever attends
            elsewhere = "results are deterministic" if config.deterministic else ""
        elif not isinstance(attention, DecodeAttention):
            elsewhere = f"attention runs on {attention.name}, whose work depends on the lengths"
        elif not sharded:
            on_device = attention
        graphs_off_because = elsewhere or ("its layers keep states" if model.states else "")
        if sharded and not elsewhere:
            graphs_off_because = "the ranks of a split model get each step from their first"
        if config.cuda_graphs == "off":
            graphs_off_because = "--cuda-graphs is off"
        elif not graphs_off_because and not config.max_cached_graphs:
            graphs_off_because = "--max-cached-graphs is 0"
        if elsewhere and config.async_batching == "on":
            raise ConfigError("async_batching", elsewhere, "use auto or off")
        sync_because = "--async-batching is off" if config.async_batching == "off" else elsewhere
        state_on_device = on_device is not None or not sync_because
        plan = cls(
            config, model, on_device, "", sync_because=sync_because, state_on_device=state_on_device
        )
        plan.turn_off(graphs_off_because)
        return plan

    def turn_off(self, reason: str) -> None:
        """Capture nothing, for this reason, if there is one. Raises ConfigError where graphs are
        asked for.
        """
        if reason and self.config.cuda_graphs == "on":
            raise ConfigError("cuda_graphs", reason, "use auto or off")
        self.graphs_off_because = self.graphs_off_because or reason

    def measure(self, max_model_len: int) -> int:
        """Bytes that graphs will take, from two of them on a small cache, of which the larger is
        proven; 0 where none is captured, and what the attempt keeps where none can be.
        """
        if self.graphs_off_because or self.attention is None:
            return 0
        groups = self.model.groups
        cache = CacheStorage(
            groups,
            self.model.cache_heads,
            units=units_of(groups) + 1,
            block_size=self.config.block_size,
            device=self.model.device,
        )
        steps = self.steps(cache, max_model_len)
        sizes, graphs = step_sizes(self.config), self.graphs
        if steps is None or graphs is None:
            return 0
        try:
            steps.capture_one(sizes[-1], HEAVIEST)
            largest, plans = graphs.nbytes, self.attention.fixed_nbytes
            steps.capture_one(sizes[0], GREEDY)
            bytes_per_graph, plan = graphs.nbytes - largest, self.attention.fixed_nbytes - plans
            reason = f"a step cannot be captured: {graphs.failure}"
            if not graphs.failure:
                reason = self._differs(steps, cache, max_model_len)
        except Exception as error:  # noqa: BLE001 - it goes without graphs
            # Of a plan at fixed addresses, the first: without graphs there is none.
            fall_back(error)
            self.turn_off(f"a step cannot be captured: {first_line(error)}")
            return self.attention.fixed_nbytes
        graphs.clear()
        if reason:
            self.turn_off(reason)
            return self.attention.fixed_nbytes
        count = min(self.config.max_cached_graphs, WAYS * len(sizes))
        plans += plan * (len(sizes) - 1)
        return largest + bytes_per_graph * (count - 1) + plans + steps.held_nbytes

    def _differs(self, steps: DecodeSteps, cache: CacheStorage, max_model_len: int) -> str:
        """Why the captured step is not used; empty where it computes what the step itself does."""
        size, median = step_sizes(self.config)[-1], has_experts(self.model)
        error = replay_error(steps, cache, size, max_model_len, median=median)
        if error <= TOLERANCE[self.model.heads.dtype]:
            return ""
        return f"a captured step gives other logits than without, by {error:.2g} of their spread"

    def steps(self, cache: CacheStorage, max_model_len: int) -> DecodeSteps | None:
        """Steps of decodes on ``cache``, whose last unit is for padding; None where they run as all
        others.
        """
        if self.attention is None:
            return None
        self.graphs = None
        if not self.graphs_off_because:
            # One of its own: torch refuses to capture into a pool whose graphs are all gone while
            # something lives there, such as a workspace of cuBLAS.
            recorder = self.new_recorder(self.model.device)
            self.graphs = GraphCache(recorder, self.config.max_cached_graphs)
        return DecodeSteps(
            self.model,
            cache,
            self.attention,
            sequences=self.config.max_rows,
            max_model_len=max_model_len,
            graphs=self.graphs,
            sizes=() if self.graphs is None else step_sizes(self.config),
        )

    def sampler(self, cache: CacheStorage, max_model_len: int) -> RowSampler | None:
        """What launched steps are sampled by where there are no ``steps``; None where none is
        launched.
        """
        if not self.state_on_device or self.attention is not None:
            return None
        lengths = {"sequences": self.config.max_rows, "max_model_len": max_model_len}
        return RowSampler.of(self.model, cache, **lengths)

    def capture(self, steps: DecodeSteps | None) -> int | None:
        """Capture what most steps need, with a bar of progress, for at most CAPTURE_SECONDS and one
        graph more. Returns the bytes of graphs and their plans, None where there are none.
        """
        if steps is None or self.graphs is None or self.attention is None:
            if self.model.device.type == "cuda":
                log.info("CUDA graphs: off: %s", self.graphs_off_because)
            return None
        began = time.monotonic()
        # A graph takes long enough to be shown at once; the default shows the first after 0.1 s.
        failure = ""
        with tqdm(desc="CUDA graphs", unit="graph", leave=False, mininterval=0) as bar:
            try:
                for done, total in steps.capture(
                    lambda: time.monotonic() - began > CAPTURE_SECONDS
                ):
                    bar.total = total
                    bar.update(done - bar.n)
            except Exception as error:  # noqa: BLE001 - it goes without graphs
                # Of a plan at fixed addresses, or of the step itself, for want of memory.
                fall_back(error)
                failure = first_line(error)
        if failure or not len(self.graphs):
            steps.drop_graphs()
            self.turn_off(f"a step cannot be captured: {failure or self.graphs.failure}")
            log.info("CUDA graphs: off: %s", self.graphs_off_because)
            return None
        size = self.graphs.nbytes + self.attention.fixed_nbytes + steps.held_nbytes
        seconds = time.monotonic() - began
        log.info("CUDA graphs: %d in %.1f s, %.2f GiB", len(self.graphs), seconds, size / (1 << 30))
        return size
