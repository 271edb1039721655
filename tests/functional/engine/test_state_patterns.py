"""Any order of layers that keep keys, keys of a window, a state or nothing, or read the keys of
another one: greedy texts are transformers' ``generate``, whatever happens beside and before them.

Each draw makes a tiny model whose layers are of a random pattern, and serves a random workload in
memory for one sequence and a little more: prompts that end at a block's end, one token behind it,
or have one token; beginnings that are shared, prompts that come again and that go on from an
answer; choices, aborts, steps that fail, preemption both ways, with every invariant checked every
few steps. A difference is excused only as a tie.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fairlead_runtime.request.sequence import Request
from fairlead_runtime.scheduling.plan import Finished, Limits
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.settings.engine_config import SchedulerType
from fairlead_runtime.sizing.groups import NO_KEYS
from support import tiny
from support.bad_steps import BadSteps, Isolating
from support.engine_rig import Rig, Setting, greedy
from support.full import LONG_FORM

DRAWS = 400 if LONG_FORM else 15
MIXTURES = 60 if LONG_FORM else 2
NEW = 20
TIE = 1e-4
MOST_STEPS = 4000
POLICIES: tuple[SchedulerType, ...] = ("fifo", "fifo", "priority", "prefill_first")

Pattern = Callable[[random.Random], dict[str, Any]]
_STATE, _FULL, _WINDOW, _CONV = "linear_attention", "full_attention", "sliding_attention", "conv"


def _kinds(draw: random.Random, kinds: tuple[str, ...], *always: str) -> list[str]:
    """Two to five layers of these kinds, of which some are ``always`` there."""
    layers = [*always, *draw.choices(kinds, k=draw.randint(max(0, 2 - len(always)), 4))]
    draw.shuffle(layers)
    return layers


def _types(*kinds: str, always: tuple[str, ...]) -> Pattern:
    def settings(draw: random.Random) -> dict[str, Any]:
        layers = _kinds(draw, kinds, *always)
        return {"layer_types": layers, "num_hidden_layers": len(layers)}

    return settings


def _nemotron(draw: random.Random) -> dict[str, Any]:
    # Without a layer that keeps keys transformers cannot generate.
    layers = _kinds(draw, (_STATE, _STATE, _FULL, "moe", "mlp"), _STATE, _FULL)
    return {
        "layers_block_type": layers,
        "num_hidden_layers": len(layers),
        "conv_kernel": draw.choice((2, 3, 4)),
        "chunk_size": draw.choice((4, 16)),
    }


def _bamba(draw: random.Random) -> dict[str, Any]:
    count = draw.randint(2, 5)
    layers = sorted(draw.sample(range(count), draw.randint(1, count - 1)))
    return {"attn_layer_indices": layers, "num_hidden_layers": count}


def _jamba(draw: random.Random) -> dict[str, Any]:
    period = draw.randint(2, 4)
    return {
        "attn_layer_period": period,
        "attn_layer_offset": draw.randrange(period),
        "num_hidden_layers": draw.randint(period, 5),
    }


def _alone(draw: random.Random) -> dict[str, Any]:
    return {"num_hidden_layers": draw.randint(1, 3), "conv_kernel": draw.choice((2, 3, 4))}


def _lfm3(draw: random.Random) -> dict[str, Any]:
    window = {"sliding_window": draw.choice((3, 8, 17))}
    return _types(_CONV, _FULL, _WINDOW, always=(_CONV, _FULL, _WINDOW))(draw) | window


def _mixture(draw: random.Random) -> dict[str, Any]:
    """All kinds in one model, also heads of two numbers, and a state beside keys in one layer."""
    layers = [_CONV] * 2 + [_FULL] * 3 + [_WINDOW] * 2
    draw.shuffle(layers)
    of = {kind: [i for i, own in enumerate(layers) if own == kind] for kind in layers}
    pairs = draw.sample((_FULL, _WINDOW), draw.randint(1, 2))
    mixture = {
        "reads": {of[kind][-1]: draw.choice(of[kind][:-1]) for kind in pairs},
        "narrow": of[_FULL if draw.random() < 0.7 else _WINDOW],
        "beside": (draw.choice(of[_FULL] + of[_WINDOW]), draw.choice(of[_CONV])),
    }
    return {
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        "sliding_window": draw.choice((3, 8, 17)),
        "mixture": mixture,
    }


def _falcon_h1(draw: random.Random) -> dict[str, Any]:
    return {"num_hidden_layers": draw.randint(1, 3), "mamba_chunk_size": draw.choice((4, 16))}


_DELTA = _types(_STATE, _STATE, _FULL, always=(_STATE, _FULL))
# By family: what a draw makes of its layers.
PATTERNS: Mapping[str, Pattern] = {
    "qwen3_5_text": _DELTA,
    "nemotron_h": _nemotron,
    "lfm3": _lfm3,
    "mamba2": _alone,
    "jamba": _jamba,
    "falcon_h1": _falcon_h1,
    "minimax": _types(_STATE, _FULL, always=(_STATE, _FULL)),
    "lfm2": _types(_CONV, _FULL, always=(_CONV, _FULL)),
    "granitemoehybrid": _types(_STATE, _FULL, always=(_STATE, _FULL)),
    "falcon_mamba": _alone,
    "qwen3_next": _DELTA,
    "bamba": _bamba,
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "lfm2_moe": _types(_CONV, _FULL, always=(_CONV, _FULL)),
}


@dataclass
class Workload:
    """Requests by the step at which they come, and aborts by that at which they are asked for.
    ``longest``: tokens of the longest request.
    """

    arrivals: list[tuple[int, Request]] = field(default_factory=list)
    aborts: list[tuple[int, str, int | None]] = field(default_factory=list)

    @property
    def longest(self) -> int:
        return max(len(request.prompt) + request.max_tokens for _, request in self.arrivals)


def workload_of(draw: random.Random, block_size: int, engine: Rig) -> Workload:
    drawn, load = [draw.randrange(3, tiny.VOCAB) for _ in range(120)], Workload()
    earlier: list[tuple[int, ...]] = []
    for number in range(draw.randint(3, 6)):
        blocks = draw.randint(1, max(1, 40 // block_size)) * block_size
        length = draw.choice((1, blocks, blocks, blocks + 1, draw.randint(2, 44)))
        shared = draw.choice((0, length // 2, length, length))
        prompt = (*drawn[:shared], *(draw.randrange(3, tiny.VOCAB) for _ in range(length - shared)))
        if earlier and draw.random() < 0.3:
            prompt = draw.choice(earlier)
            if draw.random() < 0.5:  # a conversation that goes on
                answer = engine.reference(prompt, NEW)[: draw.randint(1, 8)]
                prompt = (*prompt, *answer, drawn[number])
        earlier.append(prompt)
        due = draw.randint(0, 20)
        request = greedy(str(number), prompt, draw.randint(1, NEW), draw.choice((1, 1, 1, 2, 3)))
        load.arrivals.append((due, replace(request, priority=draw.randint(0, 2))))
        if draw.random() < 0.3:
            choice = draw.choice((None, 0, request.params.n - 1))
            load.aborts.append((due + draw.randint(1, 15), request.id, choice))
    load.arrivals.sort(key=lambda one: one[0])
    load.aborts.sort(key=lambda one: one[0])
    return load


def limits_of(draw: random.Random, engine: Rig, setting: Setting) -> Limits:
    return replace(engine.limits(setting), policy=draw.choice(POLICIES))


def serve(draw: random.Random, engine: Rig) -> Counter[str]:
    """One workload, whose texts are compared; how often what happened is returned."""
    block_size = draw.choice((1, 2, 4, 4, 8, 16))
    load = workload_of(draw, block_size, engine)
    setting = Setting(
        block_size=block_size,
        chunk=draw.choice((1, 3, 7, 16, 29, 4096)),
        num_blocks=-(-load.longest // block_size) + draw.choice((0, 0, 1, 3, 8)),
        offload=draw.random() < 0.5,
        sharing=draw.random() < 0.85,
        max_requests=draw.choice((1, 3, 8, 64)),
        beside=draw.choice((0, 0, 2)),
    )
    device = BadSteps(engine.runner(setting), seed=draw.randrange(1 << 30))
    scheduler = Scheduler(limits_of(draw, engine, setting), engine.groups, b"rig")
    texts = run(scheduler, Isolating(device), load)
    aborted = {(name, choice) for _, name, choice in load.aborts}
    for _, request in load.arrivals:
        want = engine.reference(request.prompt, request.max_tokens)
        for choice in range(request.params.n):
            got = texts.get((request.id, choice), [])
            ended = {(request.id, None), (request.id, choice)} & aborted
            compare(engine, request, got, want[: len(got)] if ended else want)
    stats = scheduler.stats()
    assert stats.used == 0, "units are still held at rest"
    return Counter(
        preemptions=stats.preemptions,
        offloads=stats.offloads,
        hits=stats.prefix_hits,
        failed=device.failed,
        aborts=len(load.aborts),
    )


def run(
    scheduler: Scheduler, device: Isolating, load: Workload
) -> dict[tuple[str, int], list[int]]:
    """The tokens of each choice. Invariants are checked every third step."""
    texts: dict[tuple[str, int], list[int]] = {}
    arrivals, aborts = [*load.arrivals], [*load.aborts]
    for step in range(MOST_STEPS):
        while arrivals and (arrivals[0][0] <= step or not scheduler.has_work):
            scheduler.add(arrivals.pop(0)[1])
        while aborts and aborts[0][0] <= step:
            scheduler.abort(*aborts.pop(0)[1:])
        if step % 3 == 0:
            scheduler.check()
        if not scheduler.has_work:
            if not arrivals:
                return texts
            continue
        work = scheduler.commit(scheduler.plan())
        device.copy(work)
        for event in scheduler.update(work, device.execute(work)):
            assert not isinstance(event, Finished), f"ended without a token: {event}"
            key = event.sequence.request.id, event.sequence.choice
            texts.setdefault(key, []).append(event.token)
    raise AssertionError(f"not done after {MOST_STEPS} steps")


def compare(engine: Rig, request: Request, got: list[int], want: list[int]) -> None:
    if got == want:
        return
    same = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
    assert same is not None, f"{len(got)} tokens in the place of {len(want)}"
    margins = engine.margin([*request.prompt, *want[:same]])
    assert min(margins) < TIE, f"token {same} of {request.id}: {got} in the place of {want}"


def drawn(number: int, family: str, layers: Pattern, least: Callable[[Rig], bool]) -> Counter[str]:
    """What happened in one draw of a model that has at ``least`` this."""
    draw = random.Random(number)
    settings = layers(draw)
    try:
        engine = Rig(family, ("cpu", "torch")[number % 2], **settings)
        assert least(engine)
        return serve(draw, engine)
    except Exception as error:
        error.add_note(f"draw {number}: {family} with {settings}")
        raise


def test_greedy_text_equals_transformers_for_any_pattern_of_layers() -> None:
    happened = Counter[str]()
    for number in range(DRAWS):
        family = [*PATTERNS][number % len(PATTERNS)]
        happened += drawn(number, family, PATTERNS[family], lambda _: True)
    # Each draw is of little memory; a form that never preempts would show nothing of it.
    for name in ("preemptions", "offloads", "hits", "failed", "aborts"):
        assert happened[name] >= DRAWS // 5, f"{name}: {happened}"


def _has_all(engine: Rig) -> bool:
    """Layers with heads of several numbers, some of which read others' keys, and some with none."""
    model = engine.model
    reads = [s not in (i, NO_KEYS) for i, s in enumerate(model.sources)]
    return model.mixed and any(reads) and NO_KEYS in model.sources and len(model.states) == 2


def test_greedy_text_equals_transformers_where_one_model_has_all_kinds_of_layers() -> None:
    happened = Counter[str]()
    for number in range(1011, 1011 + MIXTURES):  # the first few have all that is asked for
        happened += drawn(number, "lfm3", _mixture, _has_all)
    for name in ("preemptions", "offloads", "hits", "failed", "aborts"):
        assert happened[name] > MIXTURES // 10, f"{name}: {happened}"
