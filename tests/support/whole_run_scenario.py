"""Random workloads as plain data, and the oracle: each request's tokens without a scheduler."""

import random
from dataclasses import dataclass, replace

from fairlead_runtime.request.sequence import FinishReason, Request, SamplingParams
from fairlead_runtime.scheduling import Limits

VOCABULARY, EOS = 6, 0
POLICIES = ("fifo", "prefill_first", "priority", "fair")
MASK = (1 << 61) - 1


@dataclass(frozen=True)
class Arrival:
    step: int
    request: Request
    abort_at: int | None = None  # step at which it is aborted
    abort_choice: int | None = None
    abort_within: bool = False  # ... while a step is on the device
    fail_choice: int | None = None  # this choice's first sampled token is an error
    fail_by_engine: bool = False  # ... found by bisection rather than reported
    abort_offloaded: bool = False  # a choice is aborted when its blocks are in host memory


@dataclass(frozen=True)
class Scenario:
    limits: Limits
    windows: tuple[int | None, ...]
    arrivals: tuple[Arrival, ...]


# -- drawing

ROOMY = 10_000  # seeds from here on draw a larger cache, so that many start behind a blocked one


def draw(seed: int, requests: int = 56) -> Scenario:
    """A scenario with memory for the largest request plus 0 to 3 blocks, so that many preempt."""
    rng = random.Random(seed)
    if seed >= ROOMY:
        return _draw_roomy(rng)
    size = rng.choice((2, 4, 4, 8))
    text = [rng.randrange(1, VOCABULARY) for _ in range(64)]
    shape = rng.choice(
        ((12 * size, 60), (4 * size, 30), (size + 1, 60), (size + 1, 60), (2 * size, 90))
    )
    gaps = rng.choice(((0,), (0, 0, 1, 2, 5), (0, 1, 20)))
    arrivals: list[Arrival] = []
    step = 0
    for i in range(requests):
        step += rng.choice(gaps)
        arrivals.append(_arrival(rng, i, step, text, size, shape))
    largest = max(len(a.request.prompt) + a.request.max_tokens for a in arrivals)
    blocks = -(-largest // size) + rng.randrange(4)
    windows = rng.choice(
        (
            (None,),
            (None,),
            (None, 5),
            (7,),
            (3, None, 9),
            (5, None),
            (None, size, 1),
            (None, 2 * size + 1),
        )
    )
    return Scenario(
        Limits(
            policy=rng.choice(POLICIES),  # type: ignore[arg-type]
            max_batch_tokens=rng.choice((1, 3, 8, 16, 16, 64)),
            max_requests=rng.choice((1, 2, 4, 8, 8)),
            safety_margin=rng.choice((0.0, 0.0, 0.2, 0.5)),
            block_size=size,
            num_blocks=blocks,
            max_model_len=largest + rng.choice((0, 1, 100)),
            allow_block_sharing=rng.random() < 0.7,
            offload_units=rng.choice((0, 0, 3, 10, 100)),
            prefill_beside_decodes=rng.choice((0, 0, 1, 4, 12)),
        ),
        windows,
        tuple(arrivals),
    )


# A model's layers with keys, by window; without any it keeps states alone.
KEYS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (None, 5), (7,), (3, None), ())


def draw_states(seed: int, requests: int = 32) -> Scenario:
    """The same with states of some units, over layers with keys of some kinds or without any, in
    memory for the largest request, its states and little more.
    """
    scenario, rng = draw(seed, requests), random.Random(-1 - seed)
    limits, windows = scenario.limits, rng.choice(KEYS)
    units, versions = rng.choice((1, 1, 2, 3, 7)) if windows else 1, rng.choice((2, 3))
    size = limits.block_size
    largest = max(len(a.request.prompt) + a.request.max_tokens for a in scenario.arrivals)
    held = -(-units * versions // max(1, len(windows)))  # blocks of one sequence's states
    blocks = held + (-(-largest // size) if windows else 0) + rng.choice((0, 1, 3, held, 3 * held))
    tokens = (blocks - held) * size if windows else limits.max_model_len
    states = {"state_units": units, "state_versions": versions, "cache_tokens": tokens}
    return Scenario(
        replace(limits, num_blocks=blocks, **states),  # type: ignore[arg-type]
        windows,
        scenario.arrivals,
    )


def _draw_roomy(rng: random.Random) -> Scenario:
    """Small requests, some of middle size and a few that take most of the cache; nothing shared."""
    size, blocks = 4, rng.choice((50, 80))
    limits = Limits(
        policy=rng.choice(POLICIES[:3]),  # type: ignore[arg-type]
        max_batch_tokens=rng.choice((24, 40)),
        max_requests=rng.choice((10, 16)),
        safety_margin=rng.choice((0.0, 0.1)),
        block_size=size,
        num_blocks=blocks,
        max_model_len=blocks * size,
        allow_block_sharing=False,
        offload_units=0,
    )
    arrivals, step = [], 0
    for i in range(60):
        step += rng.choice((0, 0, 1, 2))
        span = rng.choice(((1, 8), (1, 8), (1, 8), (20, 60), (blocks * 2, blocks * 5 // 2)))
        output = rng.randrange(1, rng.choice((10, 30, 60)))
        prompt = tuple(rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(*span)))
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        request = Request(f"r{i}", prompt, params, output, seed=i, priority=rng.randrange(2))
        arrivals.append(Arrival(step, request))
    limits = replace(limits, prefill_beside_decodes=rng.choice((0, 5)))
    return Scenario(limits, (None,), tuple(arrivals))


def _arrival(
    rng: random.Random, i: int, step: int, text: list[int], size: int, shape: tuple[int, int]
) -> Arrival:
    length = rng.choice((1, size, size + 1, rng.randrange(1, shape[0]), rng.randrange(1, shape[0])))
    shared = rng.choice((0, length, rng.randrange(length + 1)))
    prompt = [*text, *text][:shared] + [
        rng.randrange(1, VOCABULARY) for _ in range(length - shared)
    ]
    output = rng.choice((1, 2, rng.randrange(1, shape[1]), rng.randrange(shape[1] // 2, shape[1])))
    params = SamplingParams(
        n=rng.choice((1, 1, 2, 3)),
        max_tokens=output,
        min_tokens=rng.choice((0, 0, min(5, output))),
        ignore_eos=rng.random() < 0.8,
        stop_token_ids=rng.choice(((), (), (), (5,))),
        prompt_logprobs=0 if i % 6 == 5 else None,
    )
    request = Request(
        f"r{i}",
        tuple(prompt),
        params,
        output,
        seed=rng.randrange(100),
        priority=rng.randrange(3),
        tenant=rng.choice("abc"),
        salt=rng.choice((b"", b"", b"s", b"t")),
        eos_ids=frozenset({EOS}),
    )
    choice = rng.choice((None, rng.randrange(params.n)))
    abort = step + rng.randrange(60) if rng.random() < 0.15 else None
    fail = rng.randrange(params.n) if rng.random() < 0.05 else None
    return Arrival(
        step,
        request,
        abort,
        choice,
        rng.random() < 0.4,
        fail,
        rng.random() < 0.5,
        rng.random() < 0.15,
    )


# -- the oracle


def mix(state: int, value: int) -> int:
    state = (state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    return state ^ (state >> 29)


def start_stamp(request: Request) -> int:
    return mix(1, int.from_bytes(request.salt, "little"))


def next_token(stamp: int, request: Request, choice: int, position: int) -> int:
    """The next token after the prefix of ``stamp``; deterministic, different for each choice."""
    return mix(mix(mix(stamp, request.seed), choice), position) % VOCABULARY


def alone(request: Request, choice: int) -> tuple[list[int], FinishReason]:
    """The tokens of one choice, generated without a scheduler."""
    stamp = start_stamp(request)
    out: list[int] = []
    for token in request.prompt:
        stamp = mix(stamp, token)
    while True:
        token = next_token(stamp, request, choice, len(request.prompt) + len(out))
        stamp = mix(stamp, token)
        out.append(token)
        stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else {EOS})
        if token in stops and len(out) >= request.params.min_tokens:
            return out, FinishReason.STOP
        if len(out) == request.max_tokens:
            return out, FinishReason.LENGTH
