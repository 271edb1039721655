"""The verdict on whether a request can be admitted: OK, LATER or NEVER, decided on lengths alone.
Pure: reads the state, changes nothing.
"""

from typing import Protocol

from fairlead_runtime.scheduling.plan import Verdict, VerdictKind
from fairlead_runtime.scheduling.planner import State


def judge(state: State, prompt_len: int, max_tokens: int | None) -> Verdict:
    """NEVER if prompt + max_tokens exceeds the capacity of one request; ``max_tokens`` None is
    clipped to it.

    OK and LATER hold for the moment of the call and count no prefix hit, so a request may start
    earlier.
    """
    limits, cache = state.limits, state.cache
    if message := refusal(limits, prompt_len, max_tokens):
        return Verdict(VerdictKind.NEVER, message, 0)
    resolved = limits.capacity - prompt_len if max_tokens is None else max_tokens
    if len(state.policy) or len(state.running) >= limits.max_requests:
        return Verdict(VerdictKind.LATER, "waits for earlier requests", resolved)
    target = min(cache.blocks(prompt_len) + 1, cache.blocks(prompt_len + resolved - 1))
    reserved = sum(cache.growth(s, s.computed) for s in state.running)
    margin = state.margin if state.running else 0
    need, free = target * len(cache.groups), cache.pool.available - reserved - margin
    if need > free:
        text = f"needs {need} units; {max(0, free)} are free and not reserved"
        return Verdict(VerdictKind.LATER, text, resolved)
    return Verdict(VerdictKind.OK, "starts in the next step", resolved)


class Capacity(Protocol):
    """The number of tokens that one request may have, and what limits them."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
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
        holds = (
            f"the cache holds {limits.capacity} ({limits.num_blocks} blocks * {limits.block_size})"
        )
    room = limits.capacity - prompt_len
    fix = f"lower max_tokens to {room} or shorten the prompt" if room > 0 else "shorten the prompt"
    total = f"prompt {prompt_len} + max_tokens {new_tokens} = {prompt_len + new_tokens} tokens"
    return f"{total}, but {holds}: {fix}"
