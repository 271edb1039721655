"""The mixers of a loaded model that keep a state of fixed size, and how they run on packed rows.

Owns which modules these are, by what their code asks of a cache, and what takes the place of their
forward pass: it hands transformers' own code to the current pass, which calls it for each sequence
by itself (``StateStep``). That code cannot keep packed sequences apart.

    packed row   [ a | b | c c c | d | e e ]
    calls        [a, b, d] as [3, 1]      up to DECODES decodes together, over gathered states
                 [c c c], [e e] as [1, t] each chunk of a prompt, from its own state

Where operations on states can serve a mixer, its code runs once instead (``state_packed``).
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fairlead_kernels.interface import states as packed_states
from fairlead_kernels.interface.states import StateOperations, StatePlace
from fairlead_runtime.device.model.batch import StateRows
from fairlead_runtime.device.model.state_cache import RECURRENT, FirstStates, StateCache
from fairlead_runtime.device.model.state_packed import (
    PackedCache,
    PackedMixer,
    PackedStates,
    rows_of,
)
from fairlead_runtime.device.model.state_scans import (
    SCAN,
    STEP,
    bounded_step,
    calls,
    continued_scan,
    forward_with,
    function_of,
)
from fairlead_runtime.sizing.states import DECODES, StatePart

# Of transformers' caches: the methods of which a layer with a state calls some.
_ASKS = frozenset(
    {
        *("get_conv_state", "update_conv_state"),
        *("get_recurrent_state", "update_recurrent_state"),
        *("get_linear_cache", "set_linear_cache"),
    }
)
UNBOUNDED = (0.0, math.inf)  # bounds that no time step reaches
_CACHES = ("cache_params", "past_key_values")  # the names of a mixer's argument for its cache

# Transformers' code of one mixer: of hidden states [B, t, hidden] of B sequences and their states,
# which it changes, what comes out [B, t, hidden].
Mixer = Callable[[Tensor, StateCache], Tensor]


class States(Protocol):
    """Where the states of sequences are kept."""

    def read(self, layer: int, units: Tensor) -> dict[str, Tensor]:
        """Copies of the states [B, ...] of one layer, by name, which may be changed. ``units``
        int64 [B, n].
        """
        ...

    def write(self, layer: int, units: Tensor, states: Mapping[str, Tensor]) -> None:
        """Keep these states [B, ...] of one layer."""
        ...

    def places(self, layer: int) -> Mapping[str, StatePlace]:
        """Where those of one layer lie, by name."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The tokens ``first`` to before ``end`` of a packed row, of one sequence, whose prompt ends
    before ``generated``. ``source`` int64 [1, n]: the units of the state before them, None for a
    sequence that begins; ``target``: of that behind them.
    """

    first: int
    generated: int
    end: int
    source: Tensor | None
    target: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """The rows of a pass as mixers take them. ``decodes`` int64 [B]: the places of the rows of one
    generated token, None where all tokens are such; their units ``source`` and ``target`` int64
    [B, n]. ``rows``: all rows, for mixers that compute them at once; None on a GPU.
    """

    states: States
    decodes: Tensor | None
    source: Tensor
    target: Tensor
    chunks: tuple[Chunk, ...]
    rows: packed_states.StateRows | None = None

    def run(self, layer: int, mixer: "StateMixer", hidden: Tensor) -> Tensor:
        """What a mixer makes of hidden states [1, T, hidden] of packed rows."""
        if mixer.packs and self.rows is not None:
            return mixer.run_packed(hidden, PackedStates(self.rows, self.states.places(layer)))
        if self.decodes is None:
            return self._decode(layer, mixer, hidden.transpose(0, 1)).transpose(0, 1)
        out: Tensor | None = None
        parts: list[tuple[Any, Tensor]] = []
        if len(self.decodes):
            mixed = self._decode(layer, mixer, hidden[0, self.decodes][:, None])
            parts.append((self.decodes, mixed[:, 0]))
        for chunk in self.chunks:
            tokens = slice(chunk.first, chunk.end)
            parts.append((tokens, self._compute(layer, mixer, hidden[:, tokens], chunk)[0]))
        for places, mixed in parts:
            if out is None:
                out = mixed.new_empty(hidden.shape[1], mixed.shape[-1])
            out[places] = mixed
        if out is None:
            raise RuntimeError("rows: a step without tokens")
        return out[None]

    def _decode(self, layer: int, mixer: "StateMixer", hidden: Tensor) -> Tensor:
        """Rows [B, 1, hidden] in calls of as many as memory for copies of their states is planned
        for.
        """
        parts = []
        rows = (torch.split(x, DECODES) for x in (hidden, self.source, self.target))
        for tokens, source, target in zip(*rows, strict=True):
            cache = StateCache(self.states.read(layer, source))
            parts.append(mixer.call(tokens, cache))
            self.states.write(layer, target, cache.states)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _compute(self, layer: int, mixer: "StateMixer", hidden: Tensor, chunk: Chunk) -> Tensor:
        before = None if chunk.source is None else self.states.read(layer, chunk.source)
        mixed, behind = mixer.compute(hidden, before, chunk.generated - chunk.first)
        self.states.write(layer, chunk.target, behind)
        return mixed


def step_of(rows: StateRows, states: States, device: torch.device) -> StateStep:
    """The rows of a batch on a device."""
    source, target = (x.to(device, non_blocking=True) for x in (rows.source, rows.target))
    chunks, decodes, places = list[Chunk](), list[int](), list[int]()
    end = 0
    for row, (count, prompt, begins) in enumerate(
        zip(rows.counts, rows.prompts, rows.begins, strict=True)
    ):
        end += count
        if count == 1 and not begins and not prompt:
            decodes.append(row)
            places.append(end - 1)
        else:
            own = slice(row, row + 1)
            first, read = end - count, None if begins else source[own]
            chunks.append(Chunk(first, first + prompt, end, read, target[own]))
    packed_rows = rows_of(*rows) if device.type == "cpu" else None
    if not chunks:
        return StateStep(states, None, source, target, (), packed_rows)
    at, index = (
        torch.tensor(x, dtype=torch.int64).to(device, non_blocking=True) for x in (places, decodes)
    )
    return StateStep(states, at, source[index], target[index], tuple(chunks), packed_rows)


class StateMixer:
    """One layer's mixer. ``forgets``: its code for several tokens ignores the recurrent state that
    it is given.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module  # torch types each attribute as tensor or module
        # Of the class: a module that was prepared before has another.
        self._forward: Callable[..., Any] = MethodType(type(module).forward, module)
        parameters = inspect.signature(self._forward).parameters
        names = [name for name in _CACHES if name in parameters]
        if "hidden_states" not in parameters or len(names) != 1:
            raise ValueError(f"{type(module).__name__} takes its states in a way of its own")
        self._cache = names[0]
        # Of what may be given by its place: to bind a signature takes as long as an operation.
        self._names = tuple(parameters)
        # A mixer that uses one of these raises, and the model is refused.
        self._others = {
            name: None
            for name, parameter in parameters.items()
            if name not in ("hidden_states", self._cache)
            and parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        self.returned = 1  # values, of which the first are hidden states
        self.forgets = False
        self._packed: PackedMixer | None = None
        # Of the time steps of a prompt, which the code for several tokens keeps.
        least, most = getattr(module, "time_step_limit", None) or UNBOUNDED
        self.bounds = None if (max(least, 0.0), most) == UNBOUNDED else (least, most)
        if self.bounds is not None and not calls(module, STEP):
            raise ValueError(f"{type(module).__name__} bounds its time steps in a way of its own")

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' own pass, without ours."""
        return self._forward(*args, **kwargs)

    @property
    def packs(self) -> bool:
        """Whether its code runs once for all rows of a step."""
        return self._packed is not None

    def pack(self, parts: tuple[StatePart, ...], operations: StateOperations) -> None:
        """Let it run once a step on these operations, with the states ``parts``. Raises ValueError
        where it cannot.
        """
        self._packed = PackedMixer(self.module, parts, operations)

    @contextmanager
    def calling(self, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Inside the ``with`` block its code, row by row, calls these by their names."""
        forward, self._forward = self._forward, forward_with(self.module, **functions)
        try:
            yield
        finally:
            self._forward = forward

    def unpack(self) -> None:
        """Let it run row by row, as transformers' code does."""
        self._packed = None

    def run_packed(self, hidden: Tensor, states: PackedStates) -> Tensor:
        """What a mixer that ``packs`` makes of hidden states [1, T, hidden] of a step's rows."""
        packed = self._packed
        if packed is None:
            raise RuntimeError("a mixer that runs row by row was given a whole step")
        return packed.run(lambda: self._run(packed.forward, hidden, PackedCache()), states)

    def call(self, hidden: Tensor, cache: StateCache) -> Tensor:
        """One call of transformers' code: hidden states [B, t, hidden] of B sequences."""
        return self._run(self._forward, hidden, cache)

    def _run(
        self, forward: Callable[..., Any], hidden: Tensor, cache: StateCache | PackedCache
    ) -> Tensor:
        out = forward(hidden_states=hidden, **{self._cache: cache}, **self._others)
        if isinstance(out, tuple):
            self.returned = len(out)
            out = out[0]
        mixed: Tensor = out
        return mixed

    def compute(
        self, hidden: Tensor, states: Mapping[str, Tensor] | None, prompt: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """A chunk [1, t, hidden] of one sequence and the states behind it. ``states``: those before
        it, None where the sequence begins. Its first ``prompt`` tokens are of the prompt.
        """
        if self.bounds is None or prompt in (0, hidden.shape[1]):
            return self._compute(hidden, states, bounded=prompt > 0)
        first, states = self._compute(hidden[:, :prompt], states, bounded=True)
        rest, states = self._compute(hidden[:, prompt:], states, bounded=False)
        return torch.cat([first, rest], dim=1), states

    def _compute(
        self, hidden: Tensor, states: Mapping[str, Tensor] | None, *, bounded: bool
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        if states is None:
            cache: StateCache = FirstStates()
        else:
            cache = StateCache(dict(states))
        with self._unbounded() if self.bounds and not bounded else nullcontext():
            if self.forgets and states is not None and hidden.shape[1] > 1:
                mixed = self._continue(hidden, cache)
            elif self.bounds and bounded and states is not None and hidden.shape[1] == 1:
                step = bounded_step(function_of(self.module, STEP), self.bounds)
                forward = forward_with(self.module, **{STEP: step})
                mixed = self._run(forward, hidden, cache)
            else:
                mixed = self.call(hidden, cache)
        return mixed, cache.states

    def _continue(self, hidden: Tensor, cache: StateCache) -> Tensor:
        """Several tokens behind others by a mixer that forgets: with a scan that does not, or one
        after the other.
        """
        if not calls(self.module, SCAN):
            tokens = torch.split(hidden, 1, dim=1)
            return torch.cat([self.call(token, cache) for token in tokens], dim=1)
        state = cache.states[RECURRENT]
        scan = continued_scan(function_of(self.module, SCAN), lambda: state)
        return self._run(forward_with(self.module, **{SCAN: scan}), hidden, cache)

    @contextmanager
    def _unbounded(self) -> Iterator[None]:
        """Let the mixer's code keep no bounds on time steps."""
        self.module.time_step_limit = UNBOUNDED
        try:
            yield
        finally:
            self.module.time_step_limit = self.bounds

    def hidden_of(self, *args: Any, **kwargs: Any) -> Tensor:
        """The hidden states [1, T, hidden] of a packed call. Raises RuntimeError for a call that
        is not of packed rows.
        """
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        hidden: Tensor = arguments["hidden_states"]
        if (
            hidden.shape[0] != 1
            or arguments.get("attention_mask") is not None
            or arguments.get(self._cache) is not None
        ):
            raise RuntimeError("a layer with a state takes packed rows without mask and cache")
        return hidden

    @torch.inference_mode()
    def find_whether_it_forgets(self, hidden: Tensor, states: Mapping[str, Tensor]) -> None:
        """Whether two tokens [1, 2, hidden] come out the same whatever recurrent state they
        continue. ``states``: some, of the right shapes.
        """
        drawn = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        hidden = drawn.to(hidden)  # an embedding may be zero, from which no state is read
        outputs = []
        for value in (0.0, 1.0):
            given = {
                name: torch.full_like(state, value if name.startswith(RECURRENT) else 0.0)
                for name, state in states.items()
            }
            outputs.append(self.call(hidden, StateCache(given)))
        recurrent = any(name.startswith(RECURRENT) for name in states)
        self.forgets = recurrent and torch.equal(*outputs)


def use_states(model: nn.Module, current: Callable[[], Any]) -> dict[int, StateMixer]:
    """Let the mixers of a model that keep a state run in the pass that ``current`` gives, as
    transformers has them where that is None. Raises ValueError for one that cannot.
    """
    mixers = {layer: StateMixer(module) for layer, module in state_mixers(model).items()}
    for layer, module in state_mixers(model).items():
        replaced: Any = module  # torch types each attribute as tensor or module
        replaced.forward = _packed(layer, mixers[layer], current)
    return mixers


def _packed(layer: int, mixer: StateMixer, current: Callable[[], Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        step = current()
        if step is None:
            return mixer.original(*args, **kwargs)
        mixed = step.mix(layer, mixer, mixer.hidden_of(*args, **kwargs))
        return mixed if mixer.returned == 1 else (mixed, *[None] * (mixer.returned - 1))

    return forward


def state_mixers(model: nn.Module) -> dict[int, nn.Module]:
    """The modules of a model of transformers that keep a state, by their layer. Raises ValueError
    for two in one layer.
    """
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        layer: Any = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and _asks(type(module)):
            if layer in found:
                raise ValueError(f"layer {layer} keeps two states")
            found[layer] = module
    return dict(sorted(found.items()))


def _asks(kind: type) -> bool:
    codes = (
        inspect.unwrap(method).__code__
        for part in kind.__mro__
        for method in vars(part).values()
        if inspect.isfunction(method)
    )
    return any(_ASKS & {*code.co_names} for code in codes)
