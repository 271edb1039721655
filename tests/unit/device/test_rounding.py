"""What rounding explains of a difference, and what it does not: faults planted in single layers."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairlead_kernels.cpu.cpu_operations import DIGITS_ROUNDING
from fairlead_runtime.device.conversion import fusion, recognize_ends
from fairlead_runtime.device.conversion.module_calls import Call
from fairlead_runtime.device.conversion.recording_pass import decoder_layers, record, repeat
from fairlead_runtime.device.conversion.rounding import SAMPLES, Changes, Noise
from fairlead_runtime.device.model.paged_model import PagedModel
from fairlead_runtime.models import families
from support import tiny
from support.layer_faults import run, scale_a_head

FAMILIES = ("llama", "qwen2", "gemma3_text", "gpt2", "gpt_neox")


def first_layer(family: str, massive: float) -> tuple[Any, Call, Noise]:
    """With ``massive``, one element of each token's hidden states is as large, as in trained
    models.
    """
    plain = tiny.build(family)
    if massive:
        with torch.no_grad():
            rows: Any = plain.get_input_embeddings()
            rows.weight[:, 5] = massive
    model = PagedModel(plain, families.check(plain.config))
    with torch.inference_mode():
        layers = decoder_layers(model)
        call = record(model, layers)[0].call
        noise = Noise.of(call.output[0], partial(repeat, call))
    return layers[0], call, noise


@pytest.mark.parametrize("massive", [0.0, 1e4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_in_float64_is_the_same_but_for_rounding(family: str, massive: float) -> None:
    layer, call, noise = first_layer(family, massive)

    def widened(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    arguments = {
        name: tuple(map(widened, x)) if isinstance(x, tuple) else widened(x)
        for name, x in call.arguments.items()
    }
    exact = Call(layer, (call.inputs[0].double(),), arguments, None)
    assert noise.explains(run(copy.deepcopy(layer).double(), exact), call.output[0])


@pytest.mark.parametrize("massive", [0.0, 1e4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", [scale_a_head, lambda x: x.flip(1), lambda x: x.roll(1, 0)])
def test_another_attention_is_not_explained(
    change: Callable[[Tensor], Tensor], family: str, massive: float
) -> None:
    """One head scaled by 1.01, heads swapped, tokens that read as their neighbours do."""
    layer, call, noise = first_layer(family, massive)
    assert not noise.explains(run(layer, call, change), call.output[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_matrix_rounded_twice_or_a_vector_forgotten_is_not_explained(family: str) -> None:
    layer, call, noise = first_layer(family, 0.0)
    changed = 0
    for name, parameter in copy.deepcopy(layer).named_parameters():
        other = copy.deepcopy(layer)
        own = other.get_parameter(name)
        with torch.no_grad():
            own.copy_(own.bfloat16().float() if own.dim() == 2 else torch.zeros_like(own))
        if torch.equal(own, parameter):
            continue
        changed += 1
        assert not noise.explains(run(other, call), call.output[0]), name
    assert changed > 4


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt_neox"])
def test_another_rotary_embedding_is_not_explained(family: str) -> None:
    layer, call, noise = first_layer(family, 0.0)
    names = [name for name, x in call.arguments.items() if isinstance(x, tuple)]
    cos, sin = call.arguments[names[0]]
    angle = torch.atan2(sin, cos) * 1.001
    more: Any = {names[0]: (angle.cos(), angle.sin())}
    assert not noise.explains(run(layer, call, **more), call.output[0])


def test_an_element_may_be_as_wrong_as_its_own_sums_make_it_and_nothing_beside_it() -> None:
    """A sum of large terms that nearly cancel, beside a sum of small ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 256, generator=generator)
    x = torch.cat([x, -x + 1e-3 * torch.randn(8, 256, generator=generator)], dim=1)
    matrix = nn.Linear(512, 64, bias=False).requires_grad_(False)
    matrix.weight[0] = 1e3
    want = matrix(x)
    noise = Noise.of(want, lambda changes: matrix(changes.of(x.expand(SAMPLES, *x.shape), 512)))
    order = torch.randperm(512, generator=generator)
    other = x[:, order] @ matrix.weight[:, order].T
    assert noise.explains(other, want)
    assert not noise.explains(other + torch.eye(64)[1] * noise.size[:, :1], want)


def test_what_is_not_a_number_or_has_another_shape_is_not_explained() -> None:
    want = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    noise = Noise.of(want, lambda changes: changes.of(want.expand(SAMPLES, *want.shape)))
    assert noise.explains(want.clone(), want)
    assert not noise.explains(want[:, :4], want)
    spoilt = want.clone()
    spoilt[2, 3] = torch.nan
    assert not noise.explains(spoilt, want)


def test_the_samples_of_a_layer_are_one_batch_each_with_changes_of_its_own() -> None:
    layer, call, noise = first_layer("llama", 0.0)
    assert layer is call.module
    want = call.output[0]
    with torch.inference_mode():
        samples = repeat(call, Changes(want.device))
        read = Changes(want.device).of(want.expand(SAMPLES, *want.shape))
    assert samples.shape == (SAMPLES, *want.shape)
    assert all(noise.explains(sample, want) for sample in samples)
    for changed in (samples, read):
        assert not any(torch.equal(*pair) for pair in itertools.combinations(changed, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_noise_of_logits_is_that_of_sequences_one_at_a_time(family: str) -> None:
    plain = tiny.build(family)
    model = PagedModel(plain, families.check(plain.config))
    with torch.inference_mode():
        layers = decoder_layers(model)
        step = fusion._ScratchPass(model)
        several = fusion._ScratchPass(model, 1 + SAMPLES)
        want = recognize_ends.other_logits(model, step)
        alone = recognize_ends.noise(model, layers, step, want)
        logits, together = recognize_ends.logits_and_noise(model, layers, several)
    assert torch.allclose(logits, want, rtol=0, atol=2 * float(alone.size.median())), "unchanged"
    # Of SAMPLES draws the sizes differ by chance.
    ratio = together.size / alone.size
    assert 0.25 < float(ratio.min()) <= float(ratio.max()) < 4


def test_of_one_sequence_among_others_nothing_is_changed() -> None:
    x = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))
    x[..., 0] = 300.0
    for read in (x, x[0]):
        changes = Changes(x.device, DIGITS_ROUNDING, leaves=(2, 6))
        same = (changes.of(read, 4) == read).view(6, 4)
        assert same[:2].all()
        assert not same[2:].any()


def test_the_noise_is_the_same_each_time() -> None:
    one, other = (first_layer("llama", 0.0)[2].size for _ in range(2))
    assert torch.equal(one, other)


def test_products_that_round_their_inputs_have_more_noise_than_sums_in_float32() -> None:
    """By a share of the row's largest, which small elements beside it feel."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x[:, 7] = 300.0
    matrix = nn.Linear(64, 32).requires_grad_(False)
    want = matrix(x)

    def again(changes: Changes) -> Tensor:
        out: Tensor = matrix(changes.of(x.expand(SAMPLES, *x.shape), 64))
        return out

    step = 2 * DIGITS_ROUNDING * x.abs().amax(dim=1, keepdim=True)
    rounded = matrix((x / step).round() * step)
    coarse = matrix((x / step / 32).round() * step * 32)
    assert Noise.of(want, again, DIGITS_ROUNDING).explains(rounded, want)
    assert not Noise.of(want, again, DIGITS_ROUNDING).explains(coarse, want)
    assert not Noise.of(want, again).explains(rounded, want)
