"""Why a request does not run: it is too long ever to run, or its blocks are not free yet. Decided
on lengths alone. Pure: reads the state, changes nothing.
"""

from typing import Protocol

from fairlead_runtime.request.sequence import Sequence
from fairlead_runtime.scheduling.planner import State


def room(state: State) -> int:
    """Units that waiting sequences may take: those that are free beyond the margin and beyond what
    the known tokens of the running sequences take.
    """
    growing = sum(state.cache.units(s.planned_length, s.length) for s in state.running)
    margin = state.margin if state.running else 0
    return max(0, state.cache.pool.available - growing - margin)


def most_needed(state: State, sequence: Sequence) -> int:
    """Units that a waiting sequence needs to start, whatever the prefix cache has of it."""
    cache = state.cache
    if sequence.host:
        return cache.start_units(sequence) + cache.growth(sequence, sequence.computed)
    return cache.state_need + cache.growth(sequence, 0)


class Capacity(Protocol):
    """The number of tokens that one request may have, and what limits them."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def cache_tokens(self) -> int | None: ...
    @property
    def capacity(self) -> int: ...


def refusal(limits: Capacity, prompt_len: int, max_tokens: int | None) -> str:
    """The reason why a request of this size can never run, with the arithmetic and the fix; "" if
    it can.
    """
    if prompt_len < 1:
        return "the prompt is empty: give at least one token"
    new_tokens = 1 if max_tokens is None else max_tokens
    if prompt_len + new_tokens <= limits.capacity:
        return ""
    if limits.capacity == limits.max_model_len:
        holds = f"one sequence holds {limits.capacity} (max_model_len)"
    else:
        size = f"{limits.num_blocks} blocks * {limits.block_size}"
        if limits.cache_tokens is not None:
            size += ", less one sequence's states"
        holds = f"the cache holds {limits.capacity} ({size})"
    room = limits.capacity - prompt_len
    fix = f"lower max_tokens to {room} or shorten the prompt" if room > 0 else "shorten the prompt"
    total = f"prompt {prompt_len} + max_tokens {new_tokens} = {prompt_len + new_tokens} tokens"
    return f"{total}, but {holds}: {fix}"
