"""A second rank for tests: a forked process that holds the other half of tiny models and follows
the steps of the test's process over gloo. One serves all models and settings of a run.
"""

import contextlib
import functools
import os
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairlead_kernels.choice.backend import BackendChoice, int4_products, pick
from fairlead_kernels.formats.quantize import Format
from fairlead_kernels.plain.torch_operations import TorchOperations
from fairlead_runtime.child.frames import Channel, Codec
from fairlead_runtime.device.conversion.fusion import fuse
from fairlead_runtime.device.model.batch import Batch
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.device.model.rank_group import RankGroup
from fairlead_runtime.device.proof import selftest
from fairlead_runtime.device.ranks import rank_messages, shards
from fairlead_runtime.device.ranks.rank_messages import Follower
from fairlead_runtime.device.ranks.step_messages import Copies, Forward
from fairlead_runtime.models import architecture, loading
from fairlead_runtime.models.headers import Header, TensorEntry
from fairlead_runtime.scheduling.plan import DeviceLostError, Work
from fairlead_runtime.settings.engine_config import ConfigError, EngineConfig
from fairlead_runtime.sizing.shape import ModelShape
from support import humming_standin

CPU = torch.device("cpu")
MESSAGES: Codec[Any] = Codec(dict[str, Any] | Copies | Forward)
# The tiny models that the plan admits for several ranks.
SPLIT = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "qwen3_moe"),
    *("mixtral", "llama_dynamic", "gemma", "granite", "cohere", "starcoder2", "apertus", "arcee"),
    *("cohere2", "ernie4_5", "exaone4", "helium", "ministral", "ministral3", "nemotron"),
    *("olmo", "phi", "seed_oss", "smollm3"),
)


def shape_of(model: Any) -> ModelShape:
    """What sizing reads from the model's config.json and its weights' headers."""
    tensors = {n: TensorEntry("F32", tuple(p.shape), 0, 0) for n, p in model.state_dict().items()}
    config = model.config.to_dict()
    return architecture.check(config, weights={"model.safetensors": Header(tensors, b"", 0, 0)})


def shard(model: PagedModel, ranks: RankGroup, quantize_to: Format | None = None) -> PagedModel:
    """The same with this rank's shard of its weights."""
    shape = shape_of(model.model)
    shards.shard(model.model, shape, ranks, CPU, quantize_to)
    model.probe_again()
    shards.check_heads(model.heads, shape, ranks.size)
    return model


class Met(RankGroup):
    """Ranks that have met, which a model's start may ask them to do again."""

    def connect(self, device: torch.device) -> None:
        if not dist.is_initialized():
            super().connect(device)


class Pair:
    """The test's process as rank 0, and the connection to rank 1. It is what a ModelRunner's
    Followers are.
    """

    def __init__(self) -> None:
        store = os.memfd_create("ranks")
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            _follow(theirs, store)
        theirs.close()
        self._channel = Channel(ours, MESSAGES, MESSAGES)
        self.rank_group = Met(0, 2, f"/proc/self/fd/{store}", lambda: None)
        self.rank_group.connect(CPU)

    def end(self) -> None:
        """Rank 1, and what connects it with this process."""
        self._channel.connection.shutdown(socket.SHUT_RDWR)
        os.waitpid(self.pid, 0)
        self.rank_group.close()

    def hold(self, kernels: str, *, odd: int | None = None, **model: Any) -> None:
        """Let rank 1 take the model that ``engine_rig.paged`` builds from this. The first time it
        splits it and fuses the layers that these kernels of a rig fuse, and this process must do
        the same. There layer ``odd`` has one more part, so that it does not fuse.
        """
        self._send({"model": model, "kernels": kernels, "odd": odd})

    def prepare(
        self,
        folder: Path,
        quantization: str = "none",
        dtype: str = "auto",
        *,
        on_gpu: dict[str, bool] | None = None,
    ) -> None:
        """Let rank 1 load the model in this folder and prepare its part, as this process must; with
        ``on_gpu`` on the operations of GPUs, as ``pick_on_gpu`` takes them with these arguments;
        among them ``package``, for 4-bit products of the stand-in of a package.
        """
        settings = {"quantization": quantization, "dtype": dtype, "on_gpu": on_gpu}
        self._send({"folder": str(folder), **settings})

    def allocate(self, tables: tuple[int, int] | None = None, /, **cache: int) -> None:
        """Let rank 1 allocate an empty cache, and ``tables`` as Followers have."""
        self._send({"cache": {**cache, "tables": tables}})

    def weight_bytes(self) -> int:
        """Of rank 1."""
        self._send({"weigh": True})
        answer: Any = self._channel.receive()
        return int(answer["bytes"])

    def copy(self, work: Work) -> None:
        self._send(rank_messages.copies(work))

    def forward(self, batch: Batch, keep: Tensor | None, *, ahead: bool = False) -> None:
        self._send(rank_messages.forward(batch, keep, ahead=ahead))

    def share(self, ids: Tensor) -> None:
        self.rank_group.broadcast(ids)

    def failure(self, error: Exception) -> DeviceLostError:
        return DeviceLostError(str(error))

    def _send(self, message: Any) -> None:
        self._channel.send(message)


def pick_on_gpu(
    model: PagedModel, _kernels: str, ranks: int = 1, *, fp8: bool = False, **_: Any
) -> BackendChoice:
    """In the place of the self-test's choice: the operations of GPUs in torch, which with ``fp8``
    multiply 8-bit floats.
    """
    heads = shards.heads_of(model.heads, ranks)
    attention = pick(heads, model.kinds, model.device, "torch").attention
    return BackendChoice(attention, TorchOperations(fp8=fp8))


def load(
    folder: str | Path, quantization: str = "none", dtype: str = "auto"
) -> loading.LoadedModel:
    """As a rank of two does."""
    settings: dict[str, Any] = {"quantization": quantization, "dtype": dtype}
    return loading.load(folder, config=EngineConfig(tensor_parallel=2, **settings))


@functools.cache
def pair() -> Pair:
    return Pair()


def part() -> None:
    """Before a test whose product makes a process group in the test's process."""
    if pair.cache_info().currsize:
        pair().end()
        pair.cache_clear()


def _follow(connection: socket.socket, store: int) -> NoReturn:
    """Rank 1, until rank 0's end of the socket closes."""
    from support.engine_rig import cache_of, choice_of

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BaseException):
        channel = Channel(connection, MESSAGES, MESSAGES)
        ranks = Met(1, 2, f"/proc/self/fd/{store}", lambda: None)
        ranks.connect(CPU)
        models: dict[str, PagedModel] = {}
        model: PagedModel
        kernels: str
        follower: Follower
        own_pick, replaced = selftest._pick, cast("Any", selftest)
        served: selftest.ServedModel | None = None
        while (message := channel.receive()) is not None:
            match message:
                case {"model": _}:
                    name, kernels = repr(message), message["kernels"]
                    if name not in models:
                        models[name] = _loaded(message["model"], kernels, message["odd"], ranks)
                    model, served = models[name], None
                case {"folder": _}:
                    on_gpu, quantization = message["on_gpu"], message["quantization"]
                    selftest._pick = own_pick if on_gpu is None else partial(pick_on_gpu, **on_gpu)
                    package = (on_gpu or {}).get("package")
                    products = humming_standin.int4_products if package else int4_products
                    replaced.int4_products = products
                    loaded = load(message["folder"], quantization, message["dtype"])
                    with contextlib.suppress(ConfigError):
                        served, _ = selftest.prepare_rank(
                            loaded, ranks, CPU, quantization=quantization
                        )
                        model = served.model
                case {"cache": sizes}:
                    choice = choice_of(model, kernels) if served is None else served.choice
                    tables = sizes.pop("tables", None)
                    cache = cache_of(model, **sizes)
                    follower = Follower(model, cache, choice.attention, ranks, tables)
                case {"weigh": _}:
                    channel.send({"bytes": model.weight_bytes})
                case _:
                    follower.follow(message)
    os._exit(1)


class _Times(nn.Module):
    """Multiplies by a weight of its own, which is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _loaded(described: Any, kernels: str, odd: int | None, ranks: RankGroup) -> PagedModel:
    from support.engine_rig import QUANTIZED, operations_of, paged, use_experts

    model = paged(**described)
    if odd is not None:
        mlp: Any = model.model.get_submodule(f"model.layers.{odd}.mlp")
        mlp.act_fn = nn.Sequential(mlp.act_fn, _Times())
    shard(model, ranks, QUANTIZED.get(kernels))
    fuse(model, operations_of(model, kernels), ranks)
    use_experts(model, kernels)
    return model
