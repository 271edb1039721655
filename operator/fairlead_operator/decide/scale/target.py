"""The requests one pod should have: ``targetPerReplica``, or what the pod's cache can hold. Pure.

Without ``targetPerReplica`` it is 0.8 of the typical requests that fit into a pod: those that
``concurrentTokens`` hold, at most ``maxRequests``; where layers keep states each request takes its
own beside its tokens. No target is so large that a full pod asks for no other: what waits is
bounded, too.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fairlead_operator.decide.pods.load import ServedRequests
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.spec import Autoscaling
from fairlead_runtime.sizing.traffic import Traffic

SHARE = 0.8  # of what fits into a pod
ENOUGH = 100  # finished requests whose mean length is trusted
ASSUMED_TOKENS = 1024  # prompt and output of a request, before
FULL = 0.95  # of the requests that a pod can have: with so many it must ask for another


@dataclass(frozen=True, slots=True)
class Target:
    """A number of requests per pod. ``formula`` is its arithmetic in words, ``inputs`` the numbers
    in it; both empty for a set target.
    """

    requests: float
    formula: str = ""
    inputs: Mapping[str, Any] = field(default_factory=dict)


class States(NamedTuple):
    """What one sequence's states take of a cache: so many tokens' keys. ``sequences``: as many as
    have room where no layer keeps keys, whatever their tokens; 0 where some do.
    """

    tokens: float = 0.0
    sequences: int = 0


NO_STATES = States()


def typical_request(served: Iterable[ServedRequests]) -> float | None:
    """The mean tokens of a request over all pods; None before enough of them have finished."""
    pods = list(served)
    requests = sum(pod.requests for pod in pods)
    return sum(pod.tokens for pod in pods) / requests if requests >= ENOUGH else None


def requests_that_fit(
    max_requests: int, tokens: int, typical: float | None, states: States = NO_STATES
) -> float:
    """Typical requests that one pod with ``tokens`` concurrent tokens holds. ``tokens`` is 0 while
    they are not known; they are those beside one sequence's ``states``.
    """
    if not tokens:
        return float(max_requests)
    most = float(min(max_requests, states.sequences) if states.sequences else max_requests)
    each = max(1.0, typical or ASSUMED_TOKENS) + states.tokens
    return min(most, (tokens + states.tokens) / each)


def most_requests(
    resource: InferenceDeployment,
    tokens: int,
    typical: float | None,
    connections: int = 0,
    states: States = NO_STATES,
) -> float:
    """Requests that one pod can have at a time: those run that fit beside the safety margin, below
    which none starts; others wait as requests and their tokens may, each on a connection of its
    own. ``connections``: as a pod reports them, 0 while none has.
    """
    engine, resources = resource.engine, resource.spec.resources
    planned = int(resources.memory.value * engine.max_memory_percent)
    memory = None if resources.accelerator.count else planned
    # Where the length binds the tokens that wait, max_queue binds first.
    traffic = Traffic.of(engine, engine.max_model_len or 1 << 40, memory)
    waiting = traffic.waiting_tokens.most / max(1.0, typical or ASSUMED_TOKENS)
    startable = math.floor(tokens * (1 - engine.safety_margin))
    running = requests_that_fit(engine.max_rows, startable, typical, states)
    most = running + min(float(engine.max_queue), waiting)
    return min(most, float(connections or traffic.connections.most))


def capped(target: Target, most: float, tolerance: float) -> Target:
    """The target, or the largest at which a pod with its ``most`` requests still asks for another
    beyond the ``tolerance``.
    """
    cap = max(1.0, math.floor(10 * FULL * most / (1 + tolerance)) / 10)
    if target.requests <= cap:
        return target
    formula = (
        f"{FULL:g} of the {most:.0f} requests that a pod takes at most ÷ {1 + tolerance:g} for the "
        f"tolerance: at {target.requests:g} a full pod would ask for no other"
    )
    return replace(target, requests=cap, formula=formula)


def target_of(
    configured: int | None,
    max_requests: int,
    tokens: int,
    typical: float | None,
    states: States = NO_STATES,
) -> Target:
    """The target as configured, else from the capacity of a pod; ``capped`` bounds it. ``tokens``:
    concurrentTokens of one pod, 0 while they are not known.
    """
    if configured is not None:
        return Target(float(configured))
    if not tokens:
        formula = f"maxRequests {max_requests}: the capacity of a pod is not known"
        return Target(float(max_requests), formula, {"maxRequests": max_requests})
    length, source = round(typical or ASSUMED_TOKENS), "measured" if typical else "assumed"
    target = max(1.0, round(SHARE * requests_that_fit(max_requests, tokens, typical, states), 1))
    formula = (
        f"{SHARE:g} of min({max_requests} maxRequests, {tokens} concurrent tokens ÷ "
        f"{length} tokens a request, {source})"
    )
    if states.sequences:
        formula = f"{SHARE:g} of min({max_requests} maxRequests, {states.sequences} states)"
    elif states.tokens:
        held = round(states.tokens)
        formula = (
            f"{SHARE:g} of min({max_requests} maxRequests, ({tokens} concurrent tokens + {held}) ÷ "
            f"({length} tokens a request, {source}, + {held} for its states))"
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


def pod_target(
    resource: InferenceDeployment,
    scaling: Autoscaling,
    tokens: int,
    typical: float | None,
    connections: int = 0,
    states: States = NO_STATES,
) -> Target:
    """``target_of`` the resource whose policy is ``scaling``, ``capped`` by ``most_requests``."""
    most_running = resource.engine.max_requests
    target = target_of(scaling.target_per_replica, most_running, tokens, typical, states)
    most = most_requests(resource, tokens, typical, connections, states)
    return capped(target, most, scaling.tolerance)
