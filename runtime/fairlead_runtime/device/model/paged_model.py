"""A transformers causal language model that runs on our paged cache.

Owns PagedModel and the checks of a loaded model that becomes one. Chooses neither blocks nor rows;
the attention function is in ``attention``.

Experts of MoE models run as transformers' ``grouped_mm``: equal to its eager loop except for
rounding, and each token's result independent of the others'. Where torch's grouped product waits
for the device, or does not take their widths, they run on ours (``experts``).
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from transformers import PreTrainedModel

from fairlead_kernels.choice.experts import ExpertProduct
from fairlead_kernels.interface.attention import AttentionBackend, GroupKinds, Heads
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.device.model import experts, paged_attention
from fairlead_runtime.device.model.batch import Batch
from fairlead_runtime.device.model.fixed_order import FixedOrder
from fairlead_runtime.device.model.paged_attention import (
    CURRENT_PASS,
    AttentionCall,
    CachedPass,
    ForwardPass,
    MaskRule,
    PagedPass,
    spec_of,
)
from fairlead_runtime.device.model.state_cache import FirstStates, parts_of
from fairlead_runtime.device.model.state_layers import StateMixer, use_states
from fairlead_runtime.models import families, rope
from fairlead_runtime.models.loading import LoadedModel
from fairlead_runtime.sizing.groups import NO_KEYS, LayerGroup, check_sources, group_layers
from fairlead_runtime.sizing.states import StateLayout, StatePart


class ProbePass:
    """A pass over one short sequence without a cache, which records the arguments of each layer,
    and under PROBE_NAME the rule of its mask, None where its code makes that another way. ``keys``:
    keys and values of each layer, in the order of the pass.
    """

    def __init__(self, keep: Tensor) -> None:
        self.keep = keep
        self.heads: dict[int, Heads] = {}
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}
        self.calls: dict[int, AttentionCall] = {}
        self.rules: dict[int, MaskRule | None] = {}
        self.states: dict[int, tuple[StatePart, ...]] = {}

    def mix(self, layer: int, mixer: StateMixer, hidden: Tensor) -> Tensor:
        cache = FirstStates()
        mixed = mixer.call(hidden, cache)
        if layer not in self.states:
            mixer.find_whether_it_forgets(hidden, cache.states)
        self.states[layer] = parts_of(cache.states)
        return mixed

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> Tensor:
        heads = Heads(query.shape[1], key.shape[1], key.shape[2], value.shape[2], key.dtype)
        self.heads[layer] = heads
        self.keys[layer] = key, value
        self.calls[layer] = call
        return causal_attention(query, key, value, call.scale)


def sources_of(keys: Mapping[int, tuple[Tensor, Tensor]], layers: int) -> tuple[int, ...]:
    """By layer, of so many, the first that has the very same keys and values: the one that made
    them. NO_KEYS for a layer without.
    """
    # Of tensors that are all held, no two begin at one address.
    makers: dict[tuple[int, int], int] = {}
    sources = {
        layer: makers.setdefault((k.data_ptr(), v.data_ptr()), layer)
        for layer, (k, v) in keys.items()
    }
    return tuple(sources.get(layer, NO_KEYS) for layer in range(layers))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of one whole sequence; query, key, value [T, heads, dim] → [T, heads, value dim].

    Without window, cap and sinks: enough where both sides of a comparison use it.
    """
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    per_kv = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(per_kv, dim=0) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(0, 1)


class FullPass(Protocol):
    """A pass of the whole model over packed tokens ids and positions int64 [T] without its own
    code. S: tokens of ``current.keep``. ``chooses``: ``likeliest`` gives the likeliest tokens.
    """

    chooses: bool

    def logits(self, ids: Tensor, positions: Tensor, current: CachedPass) -> Tensor:
        """The logits [S, vocabulary]."""

    def likeliest(
        self, ids: Tensor, positions: Tensor, current: CachedPass
    ) -> tuple[Tensor, Tensor]:
        """The largest logit [S] of each token, NaN where one is, and its place int64 [S], the first
        among equal ones.
        """


class PagedModel:
    """A transformers causal language model that runs packed rows on our cache.

    Takes ownership of the model: sets its attention, and installs a hook if the model cannot select
    the rows of its logits itself. By layer: ``windows``; ``sources``, the layer whose keys it
    reads; ``calls``, the arguments of its attention; ``rules``, those of its mask; ``layer_heads``.
    ``heads`` are those of the layer that keeps most, of all layers unless they are ``mixed``.
    ``device``: where it computes, if not where its weights are (``shards.computed_on``).
    ``fp8_cache``: its cache keeps 8-bit floats. Raises ModelError when the layers differ in number
    from ``windows``. ``fusion.fuse`` may replace layers afterwards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Sequence[int | None],
        device: torch.device | None = None,
        *,
        fp8_cache: bool = False,
    ) -> None:
        paged_attention.register()
        model.eval()
        self.model = model
        self.packed: list[Tensor] = []  # weights of fused layers, which no module holds
        self.full_pass: FullPass | None = None  # what serves in the place of the model's own code
        self.fixed_order: FixedOrder | None = None  # how torch computes in that code, if any
        self.windows = tuple(windows)
        self._fp8_cache = fp8_cache
        self.device: torch.device = device or model.device
        vocab_matrices: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        widths = [int(matrix.weight.shape[0]) for matrix in vocab_matrices]
        self.vocabulary, self.logits_width = min(widths), widths[1]
        self.selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._select_logits()
        for module in model.modules():  # some ask the device whether a prompt is padded: none is
            if isinstance(module, PreTrainedModel):
                module.warn_if_padding_and_no_attention_mask = _nothing
        # transformers picks grouped_mm where the model and torch support it, else eager.
        self._fast_experts: str = (
            getattr(model.config.get_text_config(), "_experts_implementation", None) or "eager"
        )
        self._experts = self._fast_experts
        try:
            self.mixers = use_states(model, CURRENT_PASS.get)
        except ValueError as error:
            raise families.unsupported(model.config.model_type, str(error)) from error
        self.heads = self._probe()
        # Of the matrices that a CPU's kernels multiply by, unless quantized: the model's, or one
        # in which they have the same numbers.
        self.matrix_dtype = self.heads.dtype

    def _select_logits(self) -> None:
        if not self.selects_logits:
            head: Any = self.model.get_output_embeddings()
            head.register_forward_pre_hook(_keep_rows)

    def swap_embeddings(self, head: nn.Module, embedding: nn.Module | None) -> None:
        """Put these in the place of the model's output matrix and, unless None, its embeddings."""
        self.model.set_output_embeddings(head)
        self._select_logits()
        if embedding is not None:
            self.model.set_input_embeddings(embedding)

    def use_experts(self, product: ExpertProduct) -> None:
        """Let its experts, which must be grouped ones of transformers, run on this product."""
        experts.register(product)
        self._experts = experts.NAME
        self._set_experts(experts.NAME)

    def probe_again(self) -> None:
        """Find out the heads and the attention arguments again, after the model was split."""
        self.heads = self._probe()

    @torch.inference_mode()
    def _probe(self) -> Heads:
        """The heads that the layers actually use, from a pass of two tokens. Without states, which
        are looked at, its linear layers need not compute: sizes and arguments are all that is read.
        """
        grouped = self._fast_experts == "grouped_mm"
        if grouped and not experts.groupable(self.model, self.device):
            self._fast_experts = self._experts = experts.LOOPED
            self._set_experts(experts.LOOPED)
        probe = ProbePass(torch.tensor([1], device=self.device))
        two = torch.tensor([0, 1], device=self.device)
        self.model.set_attn_implementation(paged_attention.PROBE_NAME)
        try:
            with nullcontext() if self.mixers else _linears_of_zeros(self.model):
                logits = self.run(two, two, probe)
        finally:
            self.model.set_attn_implementation(paged_attention.NAME)
        self.logits_dtype = logits.dtype
        name = self.model.config.model_type
        self.states = probe.states
        layers = list(range(len(self.windows)))
        # Layers that keep nothing are told from others by the sources in ``prepare``.
        if not probe.states and sorted(probe.heads) != layers:
            raise families.unsupported(
                name,
                f"{len(probe.heads)} of its {len(self.windows)} layers use transformers' attention "
                "interface",
            )
        self.calls, self.rules = probe.calls, probe.rules
        self.sources = sources_of(probe.keys, len(layers))
        try:
            check_sources(self.windows, self.sources)
        except ValueError as error:
            raise families.unsupported(name, str(error)) from error
        heads = {
            i: replace(layer, fp8_cache=self._fp8_cache) for i, layer in sorted(probe.heads.items())
        }
        # Without keys no attention runs: the type alone is read.
        widest = max(heads.values(), key=_width, default=_no_heads(self.model.dtype))
        self.layer_heads = tuple(heads.get(i, widest) for i in layers)
        return widest

    @property
    def mixed(self) -> bool:
        """Whether its layers differ in their heads."""
        return len({*self.layer_heads}) > 1

    @property
    def torch_because(self) -> str:
        """Why attention in plain torch alone can serve it on a GPU: its keys lie in places of a
        token, which the C++ kernels of CPUs read. Empty where other kernels can.
        """
        if self.states:
            return "its layers keep states, in units in which no kernels of GPUs find keys"
        if self.mixed:
            return "its layers differ in their heads, which no kernels of GPUs know"
        return ""

    @property
    def cache_heads(self) -> Heads | Sequence[Heads]:
        """The heads of every layer, or each layer's, as CacheStorage takes them."""
        return self.layer_heads if self.mixed else self.heads

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """By layer the elements of one token's key and value, 0 where it has none."""
        pairs = zip(self.layer_heads, self.sources, strict=True)
        return tuple(0 if source == NO_KEYS else _width(heads) for heads, source in pairs)

    @property
    def state_layout(self) -> StateLayout | None:
        """Where a sequence's states lie in its units; None where no layer keeps one."""
        return self.state_layout_of(self.states)

    def state_layout_of(self, states: Mapping[int, tuple[StatePart, ...]]) -> StateLayout | None:
        """Where these would lie, in a model of this type."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        return StateLayout.of(states, dtype) if states else None

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers that share block tables."""
        widths = self.kv_widths
        return group_layers(self.windows, widths, self.sources)

    @property
    def shares_answers(self) -> bool:
        """Whether a generated token has the keys and states of the same one in a prompt: not where
        time steps have bounds in prompts alone.
        """
        return all(mixer.bounds is None for mixer in self.mixers.values())

    @property
    def kinds(self) -> GroupKinds:
        """The kinds of attention in each layer group, as its layers call it: those that fuse may
        call it otherwise than the model's own.
        """
        return tuple(
            frozenset(
                spec_of(self.calls[layer], group.window).kind
                for layer in (*group.layers, *(reader for reader, _ in group.readers))
            )
            for group in self.groups
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and buffers; tied weights count once."""
        tensors = chain(self.model.parameters(), self.model.buffers(), self.packed)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values())

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        cache: CacheStorage,
        backend: AttentionBackend,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Logits [S, vocabulary] of the batch's sampling rows, or of the packed tokens ``keep``
        int64 [S].
        """
        return self.run(*self._begin(batch, cache, backend, keep))

    @torch.inference_mode()
    def likeliest(
        self, batch: Batch, cache: CacheStorage, backend: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """``FullPass.likeliest`` of the batch's sampling rows by ``full_pass``, if there is one."""
        if self.full_pass is None:
            raise RuntimeError("the model's own code gives all logits")
        return self.full_pass.likeliest(*self._begin(batch, cache, backend, None))

    def _begin(
        self, batch: Batch, cache: CacheStorage, backend: AttentionBackend, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, PagedPass]:
        """Ids, positions and the pass, on the device."""
        keep = (batch.sample_index if keep is None else keep).to(self.device, non_blocking=True)
        step = PagedPass(batch, cache, backend, keep)
        ids = batch.input_ids.to(self.device, non_blocking=True)
        return ids, batch.positions.to(self.device, non_blocking=True), step

    @torch.inference_mode()
    def run(self, input_ids: Tensor, positions: Tensor, current: ForwardPass) -> Tensor:
        """Logits [S, vocabulary] of ``current.keep`` after one pass over packed tokens int64 [T],
        attended by ``current``.
        """
        if self.full_pass is not None and isinstance(current, CachedPass):
            return self.full_pass.logits(input_ids, positions, current)
        extra = {"logits_to_keep": current.keep} if self.selects_logits else {}
        token = CURRENT_PASS.set(current)
        try:
            with self.fixed_order or nullcontext():
                out = self.model(
                    input_ids=input_ids[None],
                    position_ids=positions[None],
                    use_cache=False,
                    **extra,
                )
        finally:
            CURRENT_PASS.reset(token)
        logits: Tensor = out.logits[0]
        return logits

    @contextmanager
    def plain(self, *, experts: bool = True) -> Iterator[PreTrainedModel]:
        """Let transformers run the model eagerly, inside the ``with`` block only; with
        ``experts`` False its experts are grouped. Raises RuntimeError once layers are fused.
        """
        if self.packed:
            raise RuntimeError("transformers cannot compute layers whose weights are packed")
        self._set("eager", "eager" if experts else self._fast_experts)
        try:
            yield self.model
        finally:
            self._set(paged_attention.NAME, self._experts)

    def _set(self, attention_name: str, experts_name: str) -> None:
        self.model.set_attn_implementation(attention_name)
        if self._fast_experts != "eager":
            self._set_experts(experts_name)

    def _set_experts(self, name: str) -> None:
        """Of the text, where the class of the whole does not know that it has some."""
        knows = self.model._can_set_experts_implementation()  # noqa: SLF001 - no public one
        model: Any = self.model if knows else self.model.get_decoder()
        model.set_experts_implementation(name)


def prepare(
    loaded: LoadedModel, device: torch.device | None = None, *, fp8_cache: bool = False
) -> PagedModel:
    """Make a loaded model run on the paged cache: pin its RoPE to max_model_len, set its attention,
    check its sizes. ``device`` and ``fp8_cache`` as in PagedModel.

    Takes ownership of the model. Raises ModelError when it cannot run on the cache, or when its
    sizes differ from those that memory was sized with (``loaded.shape``).
    """
    windows = families.check(loaded.config)
    rope.pin(loaded.model, loaded.max_model_len)
    model = PagedModel(loaded.model, windows, device, fp8_cache=fp8_cache)
    if model.device.type == "cpu":
        model.matrix_dtype = loaded.matrix_dtype
    shape, heads = loaded.shape, model.heads
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim)
    states = model.state_layout_of(shape.states)
    expected = (shape.windows, shape.sources, shape.kv_widths, shape.mixed, states)
    seen = (windows, model.sources, model.kv_widths, model.mixed, model.state_layout)
    if expected != seen or (
        model.groups and sizes != (heads.query, heads.kv, heads.dim, heads.value_dim)
    ):
        reason = "its config.json describes other layers than transformers builds from it"
        if model.mixed and not shape.mixed:
            reason = families.MIXED
        raise families.unsupported(str(loaded.config.model_type), reason)
    return model


@contextmanager
def _linears_of_zeros(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block torch's linear layers give zeros and read no weights."""

    def zeros(linear: nn.Linear, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], linear.out_features, dtype=linear.weight.dtype)

    with ExitStack() as stack:
        for module in model.modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                vars(module)["forward"] = partial(zeros, module)
                stack.callback(vars(module).pop, "forward")
        yield


def _no_heads(dtype: torch.dtype) -> Heads:
    """Heads of a model without attention, in its type."""
    return Heads(1, 1, 16, 16, dtype)


def _width(heads: Heads) -> int:
    """Elements of one token's key and value."""
    return heads.kv * (heads.dim + heads.value_dim)


def _nothing(*_: object) -> None:
    """Do nothing, in the place of a warning."""


def _keep_rows(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Pass only the rows of ``keep`` to the output matrix."""
    current = CURRENT_PASS.get()
    return None if current is None else (args[0][:, current.keep], *args[1:])
