"""What a model in 16 bits keeps in float32 is planned so: against transformers' own lists on the
meta device, and against what is held.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from fairlead_runtime.models import loading, text_model
from fairlead_runtime.settings.engine_config import EngineConfig
from fairlead_runtime.sizing.families.judged import SIZED
from fairlead_runtime.sizing.families.with_states import WITH_STATES
from fairlead_runtime.sizing.family_table import FAMILIES
from fairlead_runtime.sizing.shape import ModelShape
from fairlead_runtime.sizing.weight_bytes import held_weights
from support import tiny, tiny_any

# No lists in their classes; tiny_any has no settings for them.
WITHOUT = ("gemma3n_text", "gemma4_text", "gemma4_unified_text", "mamba2", "lfm2_moe")
LOOPS = ("dbrx", "jetmoe")  # their experts are a loop of their own
ALONE = {**FAMILIES, **WITH_STATES, **SIZED}
KEPT = [
    kind
    for kind, row in ALONE.items()
    if row.wide_router or row.wide_sinks or row.wide_norms or row.choice_buffer
] + ["apertus", "minimax", "olmo_hybrid", "falcon_mamba", "falcon_h1"]
KEPT += ["llama", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_bigcode", "granite_swa"]
TABLES = ("transformer.pos_encoding",)


def test_every_class_with_such_a_list_has_a_row_that_counts_it() -> None:
    for kind, row in ALONE.items():
        if kind in WITHOUT:
            continue
        own = tiny_any.settings_of(kind)
        shape = ModelShape.from_config({"model_type": kind, **own})
        with torch.device("meta"):
            config = CONFIG_MAPPING[kind](**own)
            factory = text_model.class_to_load(config)
            model: Any = factory._from_config(config, dtype=torch.bfloat16)
        strict, more = (set(model._get_dtype_plan(t)) for t in (torch.bfloat16, torch.float16))
        tensors = dict(model.named_parameters())
        # Some classes make a tensor in float32 without a list.
        made = {name for name, x in tensors.items() if x.dtype is torch.float32}
        strict, more = strict | made, more | made
        assert count(tensors, strict) == shape.wide, kind
        assert count(tensors, more) == shape.wide + shape.wide_norms, kind
        buffers = dict(model.named_buffers())
        masks = [buffers.pop(n) for n, x in [*buffers.items()] if x.dtype is torch.bool]
        assert sum(x.nbytes for x in masks) == shape.mask_bytes, kind
        # A table of positions has the model's type after its first pass.
        made = {n for n, x in buffers.items() if x.dtype is torch.float32 and n not in TABLES}
        assert count(buffers, strict | made) == shape.buffers, kind
        every = sum(x.numel() for x in buffers.values())
        assert every == shape.buffers + shape.typed_buffers, kind
        if shape.experts and kind not in LOOPS:
            assert shares_of(model, shape.hidden) is wide(row.wide_shares), kind
        if (tables := tables_of(model)) is not None:
            assert tables is wide(row.wide_rotary == "tables"), kind


def wide(in_float32: bool) -> torch.dtype:
    return torch.float32 if in_float32 else torch.bfloat16


def shares_of(model: torch.nn.Module, hidden: int) -> torch.dtype:
    """The type of the shares that a mixture gives its experts."""

    class MetError(Exception):
        pass

    def meet(_module: torch.nn.Module, call: tuple[torch.Tensor, ...]) -> None:
        raise MetError(next(x.dtype for x in call[1:] if x.is_floating_point()))

    name, experts = next((n, m) for n, m in model.named_modules() if hasattr(m, "is_concatenated"))
    experts.register_forward_pre_hook(meet)
    mixture = model.get_submodule(name.rpartition(".")[0])
    with pytest.raises(MetError) as met:
        mixture(torch.empty(1, 3, hidden, dtype=torch.bfloat16, device="meta"))
    dtype = met.value.args[0]
    assert isinstance(dtype, torch.dtype)
    return dtype


def tables_of(model: torch.nn.Module) -> torch.dtype | None:
    """The type of rotary tables that all layers share, None where they have none of this kind."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None or len(inspect.signature(rotary.forward).parameters) != 2:
        return None
    x = torch.empty(1, 3, 8, dtype=torch.bfloat16, device="meta")
    tables = rotary(x, torch.zeros(1, 3, dtype=torch.long, device="meta"))
    dtype = tables[0].dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def count(tensors: dict[str, torch.Tensor], kept: set[str]) -> int:
    """Elements of the tensors whose modules, or themselves, have one of these names."""
    words = [re.compile(rf"(^|\.){re.escape(word)}(\.|$)") for word in kept if word]
    return sum(x.numel() for name, x in tensors.items() if any(w.search(name) for w in words))


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", pytest.param("float32", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("kind", KEPT)
def test_the_planned_weights_are_the_held_bytes(kind: str, dtype: Any, tmp_path: Path) -> None:
    build = tiny.build if kind in tiny.FAMILIES + tiny.SIZED else tiny_any.build
    saved = tiny.save(build(kind), tmp_path)
    settings = EngineConfig(dtype=dtype, kernels="torch")
    shape = loading.inspect(saved, settings).shape
    model = loading.load(saved, config=settings).model
    tensors = {id(x): x.nbytes for x in [*model.parameters(), *model.buffers()]}
    assert held_weights(shape, settings, 1, "cpu") == sum(tensors.values())
