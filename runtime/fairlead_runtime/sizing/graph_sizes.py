"""What captured CUDA graphs take, and the sizes of the steps that they are captured for.

Owns both rules, for the plan and for the runtime. Pure.
"""

from fairlead_kernels.packages.flashinfer_memory import PLAN_BYTES, WORKSPACE_BYTES, split_bytes
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.shape import ModelShape

# Assumed until it is measured at start: of one graph, its kernels' arguments.
GRAPH_BYTES = 4 << 20
BLOCK_BYTES = 4  # of a block's id
# Ways to sample a step, each with graphs of its own: three draws, with and without changed logits
# and log-probabilities, and none.
WAYS = 13


def step_sizes(config: EngineConfig) -> tuple[int, ...]:
    """The numbers of rows that steps of decodes are padded to, ascending: powers of two up to
    ``padding_interval``, from there its multiples, to the first that holds every request of a step.
    """
    return _sizes(config.max_rows, padding_interval(config))


def padding_interval(config: EngineConfig) -> int:
    """Rows. Each size has a plan of attention, so ``q_padding_interval`` is doubled while there are
    more sizes than ``max_cached_graphs`` and that makes fewer.
    """
    most, interval = config.max_rows, config.q_padding_interval
    while len(_sizes(most, interval)) > config.max_cached_graphs and interval < most:
        interval *= 2
    return interval


def padding_bound(config: EngineConfig, device: str) -> str:
    """What keeps the interval from being the one that is set, with the fields' names in braces; ""
    where it is that one, or no graph is captured.
    """
    setting, interval = config.q_padding_interval, padding_interval(config)
    if setting == interval or not may_capture(config, device):
        return ""
    return (
        f"{{q_padding_interval}} {setting} acts as {interval}: more sizes of steps than "
        f"{{max_cached_graphs}} {config.max_cached_graphs} are not captured"
    )


def _sizes(most: int, interval: int) -> tuple[int, ...]:
    sizes = [1]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(min(2 * last, interval) if last < interval else last + interval)
    return tuple(sizes)


def may_capture(config: EngineConfig, device: str) -> bool:
    """Whether the settings leave graphs on: they need the attention kernels of GPUs, which not
    every model and machine has.
    """
    return (
        device == "cuda"
        and config.tensor_parallel == 1
        and not config.deterministic
        and config.kernels in ("auto", "flashinfer")
        and config.cuda_graphs != "off"
        and config.max_cached_graphs > 0
    )


def plan_bytes(config: EngineConfig, groups: int) -> int:
    """Bytes of attention's plans for all sizes, on the device and as much in pinned host memory."""
    return groups * len(step_sizes(config)) * PLAN_BYTES


def graph_bytes(
    config: EngineConfig, shape: ModelShape, *, groups: int, blocks: int, step: int, element: int
) -> int:
    """Bytes of the graphs of a model with so many layer groups and ``blocks`` blocks in a sequence.
    ``step``: what the largest step of decodes takes, since a graph keeps its tensors. ``element``:
    bytes of a logit, of which the steps that others sample leave theirs outside of all graphs.
    """
    sizes = step_sizes(config)
    graphs = min(config.max_cached_graphs, WAYS * len(sizes))
    plans = plan_bytes(config, groups) + groups * sizes[-1] * blocks * BLOCK_BYTES
    partials = max(split_bytes(h.query, h.kv, h.value_dim, sizes[-1]) for h in shape.head_kinds)
    # In the workspace of all steps, which is no term of the plan, or in one of their own.
    workspace = partials if partials > WORKSPACE_BYTES else 0
    logits = sizes[-1] * shape.vocab * element
    return step + logits + graphs * GRAPH_BYTES + plans + workspace
