"""The requests one pod should have: ``targetPerReplica``, or what the pod's cache can hold. Pure.

Without ``targetPerReplica`` it is 0.8 of the typical requests that fit into a pod: those that
``concurrentTokens`` hold, at most ``maxRequests``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fairlead_operator.decide.pods.load import ServedRequests

SHARE = 0.8  # of what fits into a pod
ENOUGH = 100  # finished requests whose mean length is trusted
ASSUMED_TOKENS = 1024  # prompt and output of a request, before


@dataclass(frozen=True, slots=True)
class Target:
    """A number of requests per pod. ``formula`` is its arithmetic in words, ``inputs`` the numbers
    in it; both empty for a set target.
    """

    requests: float
    formula: str = ""
    inputs: Mapping[str, Any] = field(default_factory=dict)


def typical_request(served: Iterable[ServedRequests]) -> float | None:
    """The mean tokens of a request over all pods; None before enough of them have finished."""
    pods = list(served)
    requests = sum(pod.requests for pod in pods)
    return sum(pod.tokens for pod in pods) / requests if requests >= ENOUGH else None


def requests_that_fit(max_requests: int, tokens: int, typical: float | None) -> float:
    """Typical requests that one pod with ``tokens`` concurrent tokens holds. ``tokens`` is 0 while
    they are not known.
    """
    if not tokens:
        return float(max_requests)
    return min(float(max_requests), tokens / max(1.0, typical or ASSUMED_TOKENS))


def target_of(
    configured: int | None, max_requests: int, tokens: int, typical: float | None
) -> Target:
    """The target as configured, else from the capacity of a pod. ``tokens``: concurrentTokens of
    one pod, 0 while they are not known.
    """
    if configured is not None:
        return Target(float(configured))
    if not tokens:
        formula = f"maxRequests {max_requests}: the capacity of a pod is not known"
        return Target(float(max_requests), formula, {"maxRequests": max_requests})
    length, source = round(typical or ASSUMED_TOKENS), "measured" if typical else "assumed"
    target = max(1.0, round(SHARE * requests_that_fit(max_requests, tokens, typical), 1))
    formula = (
        f"{SHARE:g} of min({max_requests} maxRequests, {tokens} concurrent tokens ÷ "
        f"{length} tokens a request, {source})"
    )
    return Target(
        target,
        formula,
        {
            "maxRequests": max_requests,
            "concurrentTokens": tokens,
            "typicalTokens": length,
            "typicalFrom": source,
        },
    )
