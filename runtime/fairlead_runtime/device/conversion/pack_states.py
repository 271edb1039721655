"""Lets mixers that keep a state run once a step on operations on states, where that gives the same.

Owns the proof: each mixer gets hidden states from a pass of random tokens, and must make of them,
cut into steps of several rows, what transformers' code makes of each whole sequence. Both compute
in float32, with the mixer's weights widened, so that a wrong function is told from rounding; in
another type the operations may then be a few times as far from that as transformers' code in this
type is.

Of mixers that run the same code with the same settings on tensors of the same shapes one is proven:
their weights differ, which operations read as they are, and the self-test computes all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairlead_kernels.interface.states import StateOperations
from fairlead_runtime.device.conversion.float32_view import widened_to_float32
from fairlead_runtime.device.conversion.recognize_layer import DoesNotFitError
from fairlead_runtime.device.conversion.rounding import SAMPLES, Changes, Noise
from fairlead_runtime.device.memory.state_units import StateUnits
from fairlead_runtime.device.model.batch import StateRows
from fairlead_runtime.device.model.paged_model import PagedModel, ProbePass
from fairlead_runtime.device.model.state_layers import StateMixer, step_of
from fairlead_runtime.device.model.state_packed import functions_of
from fairlead_runtime.sizing.states import ALIGNMENT, StateLayout, StatePart, aligned

# Tokens of two sequences that each step of the proof computes: chunks, single tokens, and none of
# one; rows of more tokens than operations take at a time, up to 16, in which prompts end, too.
STEPS = ((5, 1), (1, 0), (33, 9), (1, 25), (0, 1), (0, 4))
TOKENS, PROMPT = 40, 27
UNITS = 3  # of a state, so that its tensors straddle them
# In 16 bits: times the distance of transformers' own code in this type from that in float32.
OWN_TYPE = 3.0


@dataclass(frozen=True, slots=True)
class PackedStates:
    """How many of so many mixers run once a step; ``reasons``: why others do not, by layer;
    ``proven``: how many stand for all that are alike.
    """

    packed: int = 0
    mixers: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    proven: int = field(default=0, compare=False)

    def __str__(self) -> str:
        if not self.packed and not self.reasons:
            return ""
        causes = "; ".join(f"layer {layer}: {text}" for text, layer in self.reasons.items())
        text = f", states in C++ in {self.packed}/{self.mixers} layers"
        if 0 < self.proven < self.packed:
            text += f", proven in {self.proven} of those that are alike"
        return f"{text} ({causes})" if causes else text


@torch.inference_mode()
def pack_states(model: PagedModel, operations: StateOperations | None) -> PackedStates:
    """Let each mixer of a model that can be served so run once a step on these operations; without
    any, none. One that gives other results, or that they cannot take, keeps its own way.
    """
    if operations is None or not model.states:
        return PackedStates()
    reasons: dict[str, int] = {}
    packed, proven = 0, set[object]()
    hidden: dict[int, Tensor] = {}
    for layer, mixer in model.mixers.items():
        kind = _kind(mixer.module), model.states[layer]
        try:
            mixer.pack(model.states[layer], operations)
            if kind not in proven:
                if layer not in hidden:  # of the first one, else of all: one was refused
                    hidden = _recorded(model, until=None if hidden else layer)
                _prove(mixer, model.states[layer], model.model.dtype, hidden[layer])
                proven.add(kind)
            packed += 1
        except (DoesNotFitError, ValueError, RuntimeError, TypeError, IndexError) as error:
            mixer.unpack()
            reasons.setdefault(str(error), layer)
    return PackedStates(packed, len(model.mixers), reasons, len(proven))


def _kind(mixer: nn.Module) -> object:
    """What mixers have in common that differ in their weights and their place alone. Functions and
    other objects must be the same, but for a mixer's own ``forward``, which runs its states.
    """

    def settings(module: nn.Module) -> tuple[tuple[str, str | int], ...]:
        plain = (bool, int, float, str, tuple, list, type(None))
        return tuple(
            (name, repr(value) if isinstance(value, plain) else id(value))
            for name, value in sorted(vars(module).items())
            if name != "layer_idx" and not name.startswith("_")
            if name != "forward" or module is not mixer
        )

    return tuple(
        (
            name,
            type(module),
            settings(module),
            tuple(
                (own, tensor.shape, tensor.dtype)
                for tensors in (module.named_parameters, module.named_buffers)
                for own, tensor in tensors(recurse=False)
            ),
        )
        for name, module in mixer.named_modules()
    )


class _Recorded(Exception):  # noqa: N818 - named for the condition
    """No more of a pass is wanted."""


class _RecordingPass(ProbePass):
    """Keeps what mixers get; ``until`` a layer: nothing behind its mixer is computed."""

    def __init__(self, keep: Tensor, until: int | None) -> None:
        super().__init__(keep)
        self.hidden: dict[int, Tensor] = {}
        self._until = until

    def mix(self, layer: int, mixer: StateMixer, hidden: Tensor) -> Tensor:
        self.hidden[layer] = hidden.clone()
        if layer == self._until:
            raise _Recorded
        return super().mix(layer, mixer, hidden)


def _recorded(model: PagedModel, until: int | None) -> dict[int, Tensor]:
    """The hidden states [2, TOKENS, hidden] of the mixers up to this layer, of all with None, in
    two sequences of random tokens.
    """
    generator = torch.Generator().manual_seed(0)
    hidden: list[dict[int, Tensor]] = []
    for _ in range(2):
        ids = torch.randint(0, model.vocabulary, (TOKENS,), generator=generator)
        step = _RecordingPass(torch.tensor([0], device=model.device), until)
        with suppress(_Recorded):
            model.run(ids.to(model.device), torch.arange(TOKENS, device=model.device), step)
        hidden.append(step.hidden)
    first, second = hidden
    return {layer: torch.cat([first[layer], second[layer]]) for layer in first}


def _prove(
    mixer: StateMixer,
    parts: tuple[StatePart, ...],
    dtype: torch.dtype,
    hidden: Tensor,
) -> None:
    """Raise DoesNotFitError unless rounding explains what the operations change."""

    def sequences_of(x: Tensor) -> Tensor:
        """What transformers' code makes of whole sequences [B, TOKENS, hidden]."""
        return mixer.compute(x, None, PROMPT)[0]

    wide = hidden.float()

    def explained(samples: int) -> bool:
        def again(changes: Changes) -> Iterator[Tensor]:
            with changes.inside(mixer.module.modules()), _changed(mixer, parts, changes):
                out = sequences_of(wide.repeat(samples, 1, 1))
            yield from out.view(samples, -1, out.shape[-1])

        return Noise.of(want, again).explains(got, want)

    with widened_to_float32(mixer.module):
        want = sequences_of(wide).flatten(0, 1)
        got = _in_steps(mixer, parts, torch.float32, wide)
        rounded = explained(1) or explained(SAMPLES)
    if not rounded:
        raise DoesNotFitError("operations on its states give other results")
    if dtype is torch.float32:
        return
    narrow = sequences_of(hidden).flatten(0, 1).float()
    got = _in_steps(mixer, parts, dtype, hidden).float()
    away, allowed = ((x - want).square().mean().sqrt() for x in (got, narrow))
    if not away <= OWN_TYPE * allowed:
        raise DoesNotFitError(f"operations on its states give other results in {dtype}")


@contextmanager
def _changed(mixer: StateMixer, parts: tuple[StatePart, ...], changes: Changes) -> Iterator[None]:
    """Inside the ``with`` block the functions that touch its states read changed tensors, too."""
    functions = {
        name: _reads_changed(function, changes)
        for name, function in functions_of(mixer.module, parts).items()
    }
    with mixer.calling(functions):
        yield


def _reads_changed(function: Callable[..., object], changes: Changes) -> Callable[..., object]:
    def call(*args: object, **settings: object) -> object:
        read = {name: changes.of(x) for name, x in settings.items()}
        return function(*(changes.of(x) for x in args), **read)

    return call


def _in_steps(
    mixer: StateMixer, parts: tuple[StatePart, ...], dtype: torch.dtype, hidden: Tensor
) -> Tensor:
    """What the mixer makes of two sequences [2, TOKENS, hidden] in STEPS, with states that lie over
    units of NaN: [2 TOKENS, hidden].
    """
    name = str(dtype).removeprefix("torch.")
    # In 16 bits recurrent states are float32 all the same.
    typed = [part._replace(dtype=part.dtype if part.dtype == "float32" else name) for part in parts]
    layout = StateLayout.of({0: typed}, name)
    unit = aligned(max(ALIGNMENT, -(-layout.nbytes // UNITS)))
    count = layout.units(unit)
    pool = torch.full((4 * count, unit), 0xFF, dtype=torch.uint8)
    states = StateUnits(pool, layout)
    # Two versions of two sequences, whose units alternate and run backwards.
    units = torch.arange(4 * count).flip(0).view(count, 4).T.contiguous()
    versions, done = [0, 0], [0, 0]
    out: list[list[Tensor]] = [[], []]
    for step in STEPS:
        rows = [row for row in (0, 1) if step[row]]
        counts = tuple(step[row] for row in rows)
        prompts = tuple(min(step[r], max(0, PROMPT - done[r])) for r in rows)
        packed = StateRows(
            counts,
            prompts,
            tuple(done[row] == 0 for row in rows),
            torch.stack([units[2 * row + versions[row]] for row in rows]),
            torch.stack([units[2 * row + 1 - versions[row]] for row in rows]),
        )
        x = torch.cat([hidden[row, done[row] : done[row] + step[row]] for row in rows])
        mixed = step_of(packed, states, torch.device("cpu")).run(0, mixer, x[None])[0]
        for row, part in zip(rows, torch.split(mixed, list(counts)), strict=True):
            out[row].append(part)
            done[row] += step[row]
            versions[row] = 1 - versions[row]
    return torch.cat([*out[0], *out[1]])
