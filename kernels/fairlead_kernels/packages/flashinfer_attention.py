"""Paged attention by flashinfer's wrappers, on NVIDIA GPUs.

Owns one wrapper for each layer group, kind of layer and form of step, their plans and workspaces,
and the table of what the kernels can do. ``flashinfer_package`` imports the package,
``flashinfer_plan`` makes the arguments of a plan. The reasons are in
docs/design/0006-gpu-attention.md.

A step of decodes alone runs on the decode wrapper, any other step, whole, on the prefill wrapper,
which takes rows of one query too. Layers with sinks have a wrapper of their own for both.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fairlead_kernels.interface.attention import (
    DecodeRows,
    GroupKinds,
    Heads,
    LayerKind,
    LayerSpec,
    RaggedRows,
)
from fairlead_kernels.interface.not_available import FaultError, NotAvailableError, brief, name_of
from fairlead_kernels.packages.flashinfer_memory import PLAN_BYTES, WORKSPACE_BYTES, split_bytes
from fairlead_kernels.packages.flashinfer_package import FlashinferPackage
from fairlead_kernels.packages.flashinfer_plan import PagedRows, decode_rows, paged_rows

# The generation of kernels that is asked for, on every GPU: `auto` would take another on Hopper,
# with modules of its own to compile and without the fixed splits that equal results need.
FA2 = "fa2"
# Wrappers are planned one after another in every step, and each takes PLAN_BYTES.
MOST_PLANS = 32


@dataclass(frozen=True, slots=True)
class Supported:
    """The abilities of the kernels. ``dims``: sizes of a head, of queries, keys and values alike;
    any number of query heads may share a key-value head, since decodes run on tensor cores too.
    ``sinks``: the sizes for layers with sinks.
    """

    dtypes: frozenset[torch.dtype]
    dims: frozenset[int]
    sinks: frozenset[int]

    def check_heads(self, heads: Heads) -> None:
        """Raise NotAvailableError with the reason for heads that the kernels cannot serve."""
        if heads.dtype not in self.dtypes:
            names = " and ".join(sorted(name_of(dtype) for dtype in self.dtypes))
            raise NotAvailableError(
                f"flashinfer computes in {names}, the model in {name_of(heads.dtype)}"
            )
        if heads.value_dim != heads.dim:
            raise NotAvailableError(
                f"its keys have {heads.dim} elements a head, its values {heads.value_dim}; "
                "flashinfer's decode wrapper takes one size for both"
            )
        if heads.dim not in self.dims:
            sizes = ", ".join(map(str, sorted(self.dims)))
            raise NotAvailableError(
                f"flashinfer has kernels for {sizes} elements a head, the model has {heads.dim}"
            )

    def check_kinds(self, kinds: GroupKinds, heads: Heads) -> None:
        """Raise NotAvailableError with the reason for layers that the kernels cannot serve."""
        # The package names the modules of sinks by the type of queries and the window alone, so one
        # that was compiled for another cache or another size would be taken.
        sinks = any(kind.sinks for group in kinds for kind in group)
        if sinks and heads.fp8_cache:
            raise NotAvailableError("flashinfer's kernels with sinks do not read an fp8 cache")
        if sinks and heads.dim not in self.sinks:
            sizes = ", ".join(map(str, sorted(self.sinks)))
            raise NotAvailableError(
                f"flashinfer's kernels with sinks are for {sizes} elements a head, the model has "
                f"{heads.dim}"
            )
        if any(kind.sinks and kind.softcap is not None for group in kinds for kind in group):
            raise NotAvailableError("flashinfer has no kernel with both sinks and a softcap")
        plans = sum(map(len, kinds))
        if plans > MOST_PLANS:
            raise NotAvailableError(
                f"its layers differ so much that each step would make {plans} plans, more than "
                f"{MOST_PLANS}"
            )


# fa2 is compiled for any multiple of 16, but merges the parts of a split row for these sizes only
# (and for 512, which none of its built modules and no served family has). Float32 has no kernel.
# Sinks are those of gpt-oss, whose modules the CUDA image has.
SUPPORTED = Supported(
    dtypes=frozenset({torch.float16, torch.bfloat16}),
    dims=frozenset({64, 128, 256}),
    sinks=frozenset({64}),
)


# The form of a step that a wrapper serves: rows of any length, decodes, or as many decodes at
# addresses that stay.
Form = Literal["rows", "decodes"] | int


@dataclass(frozen=True, slots=True, eq=False)
class FlashinferPlan:
    """A step of one group. It lives in the wrappers, so the group's next plan ends it."""

    group: int
    window: int | None
    form: Form


class _Wrapper:
    """One wrapper of the package, and the event behind the copies of its newest plan.

    A plan is written to the wrapper's pinned memory and copied from there to the device, in the
    stream's order. Nothing else keeps the next plan from overwriting the pinned memory before the
    copy has run, so it waits for the event. On the device the stream's order is enough: the copy
    comes after all kernels that read the plan before.
    """

    def __init__(self, wrapper: Any, package: FlashinferPackage) -> None:
        self.wrapper = wrapper
        self._copied = package.event()

    def plan(self, *arguments: Any, **options: Any) -> None:
        self._copied.synchronize()
        self.wrapper.plan(*arguments, **options)
        self._copied.record()


class FlashinferAttention:
    """``AttentionBackend`` by flashinfer, for a model with these heads and kinds of layers.

    All work is queued on the current stream, so that the wrappers can share one workspace. Raises
    NotAvailableError with the reason for a model that ``supported`` leaves out, or where a wrapper
    cannot be made: that of sinks compiles or loads its module at once.

    ``enable_pdl``: whether a kernel may begin before the one ahead of it has ended (programmatic
    dependent launch); None: where the package says that the GPU can.
    """

    name = "flashinfer"

    def __init__(
        self,
        heads: Heads,
        kinds: GroupKinds,
        device: torch.device,
        package: FlashinferPackage,
        *,
        supported: Supported = SUPPORTED,
        workspace_bytes: int = WORKSPACE_BYTES,
        enable_pdl: bool | None = None,
    ) -> None:
        supported.check_heads(heads)
        supported.check_kinds(kinds, heads)
        self.heads = heads
        self.kinds = kinds
        self._package = package
        self._enable_pdl = enable_pdl
        # Zeros: the decode wrapper asks for them before its first use.
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        # Those of plans at fixed addresses that need larger ones; the largest is the last.
        self._larger: list[Tensor] = []
        self._gpu = package.properties(device)
        self._wrappers: dict[tuple[int, LayerKind, Form], _Wrapper] = {}
        # By group, where the blocks of steps at fixed addresses are, whatever their rows.
        self._blocks: dict[int, Tensor] = {}
        for group, kind in (
            (i, kind) for i, group_kinds in enumerate(kinds) for kind in group_kinds
        ):
            try:
                rows = self._make(group, kind, "rows")
                decodes = rows if kind.sinks else self._make(group, kind, "decodes")
            except Exception as error:
                raise FaultError(
                    f"flashinfer's wrapper for {kind} cannot be made here: {brief(error)}"
                ) from error
            self._wrappers[group, kind, "rows"] = rows
            self._wrappers[group, kind, "decodes"] = decodes
        self._plans: dict[int, FlashinferPlan] = {}  # the newest of each group

    def _make(self, group: int, kind: LayerKind, form: Form) -> _Wrapper:
        package, h = self._package, self.heads
        workspace, fixed = self._workspace, dict[str, Any]()
        if isinstance(form, int):
            workspace = self._workspace_for(form)
            fixed = self._fixed(group, form, queries=kind.sinks)
        if kind.sinks:
            # The module is chosen here and not by the plan, so the sizes come here too.
            wrapper = package.sinks(
                workspace,
                "NHD",
                backend=FA2,
                q_data_type=h.dtype,
                kv_data_type=h.cache_dtype,
                head_dim_qk=h.dim,
                head_dim_vo=h.value_dim,
                window_left=_window_left(kind.window),
                **fixed,
            )
        elif form != "rows":
            wrapper = package.decode(workspace, "NHD", use_tensor_cores=True, backend=FA2, **fixed)
        else:
            wrapper = package.prefill(workspace, "NHD", backend=FA2)
        return _Wrapper(wrapper, package)

    def _workspace_for(self, rows: int) -> Tensor:
        """A workspace that is large enough for a plan of so many decodes at fixed addresses."""
        largest = self._larger[-1] if self._larger else self._workspace
        h, gpu = self.heads, self._gpu
        sizes = h.query, h.kv, h.dim, rows, gpu.multi_processor_count
        if largest.nbytes < (needed := split_bytes(*sizes, older=gpu.major < 8)):
            largest = torch.zeros(needed, dtype=torch.uint8, device=largest.device)
            self._larger.append(largest)
        return largest

    def _fixed(self, group: int, rows: int, *, queries: bool) -> dict[str, Any]:
        """The arguments that give a wrapper its addresses, under the names of its class."""
        device = self._workspace.device
        starts, lasts = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (rows + 1, rows)
        )
        blocks, end = self._blocks[group], "_buf" if queries else "_buffer"
        names = {"paged_kv_indptr": starts, "paged_kv_indices": blocks}
        names["paged_kv_last_page_len"] = lasts
        fixed: dict[str, Any] = {f"{name}{end}": tensor for name, tensor in names.items()}
        if queries:
            fixed["qo_indptr_buf"] = torch.zeros_like(starts)
        return {"use_cuda_graph": True, **fixed}

    @property
    def nbytes(self) -> int:
        """Device bytes of the workspaces, but for those of plans at fixed addresses."""
        return self._workspace.nbytes + self._plan_bytes(fixed=False)

    def reserve(self, _rows: int) -> int:
        """``DecodeAttention.reserve``: whatever the rows are."""
        return self.nbytes

    @property
    def fixed_nbytes(self) -> int:
        """Device bytes of the plans at fixed addresses that were made so far, and of their
        workspaces.
        """
        fixed = sum(tensor.nbytes for tensor in (*self._blocks.values(), *self._larger))
        return fixed + self._plan_bytes(fixed=True)

    def _plan_bytes(self, *, fixed: bool) -> int:
        wrappers = {w for (*_, form), w in self._wrappers.items() if isinstance(form, int) is fixed}
        return len(wrappers) * PLAN_BYTES

    def plan(self, ragged: RaggedRows) -> FlashinferPlan:
        rows = paged_rows(ragged, pinned=self._workspace.is_cuda)
        return self._planned(ragged, rows, "decodes" if rows.single else "rows")

    def plan_decodes(self, decodes: DecodeRows, room: int = 0) -> FlashinferPlan:
        count, group = len(decodes.kv_lens), decodes.group
        if room:
            blocks = self._blocks.get(group)
            if blocks is None:
                device = self._workspace.device
                blocks = self._blocks[group] = torch.zeros(room, dtype=torch.int32, device=device)
            if len(blocks) < room:
                raise ValueError(f"room: layer group {group} has fixed plans for {len(blocks)}")
            for kind in self.kinds[group]:
                if (group, kind, count) not in self._wrappers:
                    self._wrappers[group, kind, count] = self._make(group, kind, count)
        return self._planned(decodes, decode_rows(decodes), count if room else "decodes")

    def _planned(
        self, step: RaggedRows | DecodeRows, rows: PagedRows, form: Form
    ) -> FlashinferPlan:
        self._plans.pop(step.group, None)
        plan = FlashinferPlan(step.group, step.window, form)
        for kind in self.kinds[step.group]:
            if kind.window != step.window:
                raise ValueError(
                    f"window: the rows have {step.window}, their layer group has {kind.window}"
                )
            wrapper = self._wrappers[step.group, kind, form]
            self._plan(wrapper, kind, rows, step.block_size)
        self._plans[step.group] = plan
        return plan

    def _plan(self, wrapper: _Wrapper, kind: LayerKind, rows: PagedRows, block_size: int) -> None:
        h = self.heads
        options: dict[str, Any] = {
            "sm_scale": kind.scale,
            "window_left": _window_left(kind.window),
            "logits_soft_cap": kind.softcap,
            "q_data_type": h.dtype,
            "kv_data_type": h.cache_dtype,
        }
        blocks = rows.starts, rows.indices, rows.last_lens
        if rows.single and not kind.sinks:
            wrapper.plan(*blocks, h.query, h.kv, h.dim, block_size, **options)
        else:
            wrapper.plan(
                rows.query_starts,
                *blocks,
                h.query,
                h.kv,
                h.dim,
                block_size,
                head_dim_vo=h.value_dim,
                causal=True,
                **options,
            )

    def run(
        self,
        plan: FlashinferPlan,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        spec: LayerSpec,
    ) -> Tensor:
        spec.check_window(plan.window)
        if self._plans.get(plan.group) is not plan:
            raise ValueError(f"plan: layer group {plan.group} has been planned again since")
        wrapper = self._wrappers.get((plan.group, spec.kind, plan.form))
        if wrapper is None:
            raise ValueError(f"spec: no plan of layer group {plan.group} is for {spec.kind}")
        dtype, query = query.dtype, query.to(self.heads.dtype)
        if query.stride(-1) != 1:
            query = query.contiguous()
        caches = key_cache, value_cache
        # The prefill wrapper would fill an output of its own with zeros first.
        out = torch.empty(
            (*query.shape[:2], self.heads.value_dim), dtype=query.dtype, device=query.device
        )
        sinks = () if spec.sinks is None else (spec.sinks.float().contiguous(), spec.scale)
        wrapper.wrapper.run(query, caches, *sinks, out=out, enable_pdl=self._enable_pdl)
        return out.to(dtype)


def _window_left(window: int | None) -> int:
    """The keys before its own that a query sees; -1: all."""
    return -1 if window is None else window - 1
