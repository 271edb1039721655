"""Random workloads under scarce memory, run to their end against a device that remembers every slot it wrote.

A Scenario is plain data drawn from a seed; ``run`` plays it, checks the invariants after every step, every key that
a row reads, every event, and every delivered token against an oracle that never saw the scheduler. ``shrink``
drops events from a failing scenario while it still fails.
"""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fairlead_runtime.cache.groups import NULL, LayerGroup, group_layers
from fairlead_runtime.request import FinishReason, Request, SamplingParams, Sequence
from fairlead_runtime.scheduling import Finished, Limits, Plan, Result, Row, Scheduler, Token, Work

VOCABULARY, EOS = 6, 0
POLICIES = ("fifo", "prefill_first", "priority", "fair")
MASK = (1 << 61) - 1


class RunError(AssertionError):
    """The run went wrong; the message says where."""


@dataclass(frozen=True)
class Arrival:
    step: int
    request: Request
    abort_at: int | None = None  # step from which it is aborted
    abort_choice: int | None = None
    fail_choice: int | None = None  # this choice's first sampled token is an error
    fail_by_engine: bool = False  # ... found by bisection rather than reported
    abort_offloaded: bool = False  # a choice is aborted whenever it lies in host memory


@dataclass(frozen=True)
class Scenario:
    limits: Limits
    windows: tuple[int | None, ...]
    arrivals: tuple[Arrival, ...]


@dataclass
class Outcome:
    steps: int = 0
    preemptions: int = 0
    offloads: int = 0
    forks: int = 0
    hits: int = 0
    delivered: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finishes: dict[tuple[str, int], FinishReason] = field(default_factory=dict)


# -- drawing


def draw(seed: int, requests: int = 40) -> Scenario:
    """Memory for the largest request plus 0 to 3 blocks: preemption is the normal case."""
    rng = random.Random(seed)
    size = rng.choice((2, 4, 4, 8))
    text = [rng.randrange(1, VOCABULARY) for _ in range(64)]
    shape = rng.choice(((12 * size, 60), (4 * size, 30), (size + 1, 60), (size + 1, 60), (2 * size, 90)))
    gaps = rng.choice(((0,), (0, 0, 1, 2, 5), (0, 1, 20)))
    arrivals: list[Arrival] = []
    step = 0
    for i in range(requests):
        step += rng.choice(gaps)
        arrivals.append(_arrival(rng, i, step, text, size, shape))
    largest = max(len(a.request.prompt) + a.request.max_tokens for a in arrivals)
    blocks = -(-largest // size) + rng.randrange(4)
    windows = rng.choice(
        ((None,), (None,), (None, 5), (7,), (3, None, 9), (5, None), (None, size, 1), (None, 2 * size + 1))
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
        ),
        windows,
        tuple(arrivals),
    )


def _arrival(
    rng: random.Random, i: int, step: int, text: list[int], size: int, shape: tuple[int, int]
) -> Arrival:
    length = rng.choice((1, size, size + 1, rng.randrange(1, shape[0]), rng.randrange(1, shape[0])))
    shared = rng.choice((0, length, rng.randrange(length + 1)))
    prompt = [*text, *text][:shared] + [rng.randrange(1, VOCABULARY) for _ in range(length - shared)]
    output = rng.choice((1, 2, rng.randrange(1, shape[1]), rng.randrange(shape[1] // 2, shape[1])))
    params = SamplingParams(
        n=rng.choice((1, 1, 2, 3)),
        max_tokens=output,
        min_tokens=rng.choice((0, 0, min(5, output))),
        ignore_eos=rng.random() < 0.8,
        stop_token_ids=rng.choice(((), (), (), (5,))),
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
    return Arrival(step, request, abort, choice, fail, rng.random() < 0.5, rng.random() < 0.15)


# -- the oracle


def _mix(state: int, value: int) -> int:
    state = (state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    return state ^ (state >> 29)


def _start(request: Request) -> int:
    return _mix(1, int.from_bytes(request.salt, "little"))


def next_token(stamp: int, request: Request, choice: int, position: int) -> int:
    """What the model says after the prefix that ``stamp`` stands for; deterministic, different for each choice."""
    return _mix(_mix(_mix(stamp, request.seed), choice), position) % VOCABULARY


def alone(request: Request, choice: int) -> tuple[list[int], FinishReason]:
    """The tokens of one choice, generated without any scheduler."""
    stamp = _start(request)
    out: list[int] = []
    for token in request.prompt:
        stamp = _mix(stamp, token)
    while True:
        token = next_token(stamp, request, choice, len(request.prompt) + len(out))
        stamp = _mix(stamp, token)
        out.append(token)
        stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else {EOS})
        if token in stops and len(out) >= request.params.min_tokens:
            return out, FinishReason.STOP
        if len(out) == request.max_tokens:
            return out, FinishReason.LENGTH


# -- the device


class Device:
    """A cache whose slots hold stamps of (salt, all tokens up to the position, group); reads must find their own."""

    def __init__(self, groups: tuple[LayerGroup, ...], size: int) -> None:
        self.groups, self.size = groups, size
        self.units: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}
        self._stamps: dict[int, list[int]] = {}

    def stamps(self, sequence: Sequence) -> list[int]:
        """By position, of all known tokens."""
        stamps = self._stamps.setdefault(sequence.id, [])
        state = stamps[-1] if stamps else _start(sequence.request)
        for token in sequence.tokens[len(stamps) :]:
            state = _mix(state, token)
            stamps.append(state)
        return stamps

    def copy(self, work: Work) -> None:
        for device, host in work.offload:
            self.host[host] = list(self._unit(device))
        for host, device in work.restore:
            self.units[device] = list(self.host.pop(host))
        for source, target in work.copies:
            self.units[target] = list(self._unit(source))

    def forward(self, rows: list[Row]) -> dict[int, Result]:
        for row in rows:
            self._write(row)
        for row in rows:
            self._read(row)
        results = {}
        for sequence, start, count, samples in rows:
            if samples:
                stamp = self.stamps(sequence)[start + count - 1]
                token = next_token(stamp, sequence.request, sequence.choice, start + count)
                results[sequence.id] = Result(token)
        return results

    def _unit(self, unit: int) -> list[int]:
        return self.units.setdefault(unit, [0] * self.size)

    def _write(self, row: Row) -> None:
        stamps = self.stamps(row.sequence)
        for group, table in zip(self.groups, row.sequence.tables, strict=True):
            for position in range(row.start, row.start + row.count):
                block, offset = divmod(position, self.size)
                self._unit(table[block])[offset] = stamps[position] ^ group.index

    def _read(self, row: Row) -> None:
        end = row.start + row.count
        stamps = self.stamps(row.sequence)
        for group, table in zip(self.groups, row.sequence.tables, strict=True):
            oldest = 0 if group.window is None else max(0, row.start - group.window + 1)
            for block in range(oldest // self.size, -(-end // self.size)):
                first, last = max(oldest, block * self.size), min(end, (block + 1) * self.size)
                if table[block] == NULL:
                    raise RunError(f"sequence {row.sequence.id} reads block {block} that its window freed")
                found = self._unit(table[block])[first % self.size : first % self.size + last - first]
                if found != [stamp ^ group.index for stamp in stamps[first:last]]:
                    raise RunError(f"sequence {row.sequence.id} reads foreign keys at {first}..{last - 1}")


# -- the run


class Play:
    def __init__(self, scenario: Scenario, make: Callable[..., Scheduler] = Scheduler) -> None:
        self.scenario = scenario
        groups = group_layers(scenario.windows)
        self.scheduler = make(scenario.limits, groups, b"model")
        self.device = Device(groups, scenario.limits.block_size)
        self.outcome = Outcome()
        self.ended: set[int] = set()
        self.by_id = {a.request.id: a for a in scenario.arrivals}

    def run(self) -> Outcome:
        arrivals = sorted(self.scenario.arrivals, key=lambda a: a.step)
        aborts = sorted((a for a in arrivals if a.abort_at is not None), key=lambda a: a.abort_at or 0)
        now = 0
        bound = self._bound()
        while arrivals or self.scheduler.has_work:
            if not self.scheduler.has_work:
                now = max(now, arrivals[0].step)
            while arrivals and arrivals[0].step <= now:
                self.scheduler.add(arrivals.pop(0).request)
            while aborts and (aborts[0].abort_at or 0) <= now:
                abort = aborts.pop(0)
                for event in self.scheduler.abort(abort.request.id, abort.abort_choice):
                    self._finished(event)
            for sequence in [s for s in self.scheduler.live() if s.host]:
                if self.by_id[sequence.request.id].abort_offloaded:
                    for event in self.scheduler.abort(sequence.request.id, sequence.choice):
                        self._finished(event)
            self.scheduler.check()
            if self.scheduler.has_work:
                self.step()
                self.scheduler.check()
            now += 1
            if self.outcome.steps > bound:
                raise RunError(f"not done after {bound} steps: livelock")
        self._at_rest()
        return self.outcome

    def _bound(self) -> int:
        """Far above what any run needs, far below forever."""
        return 1000 + 20 * sum(
            a.request.params.n * (len(a.request.prompt) + a.request.max_tokens)
            for a in self.scenario.arrivals
        )

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan != self.scheduler.plan():
            raise RunError("planning twice gives different plans")
        self._within_limits(plan)
        started = {s.id for s in self.scheduler.running}
        work = self.scheduler.commit(plan)
        self.device.copy(work)
        results = self.device.forward(work.rows)
        work = self._inject(work, results)
        for event in self.scheduler.update(work, results):
            if isinstance(event, Token):
                self._token(event)
            else:
                self._finished(event)
        outcome = self.outcome
        outcome.steps += 1
        outcome.preemptions += len(plan.preempted)
        outcome.offloads += sum(p.offload for p in plan.preempted)
        outcome.forks += sum(a.source == "fork" for a in plan.admitted)
        outcome.hits += sum(a.start for a in plan.admitted if a.source == "prefix")
        if plan.preempted and (plan.admitted or not started):
            raise RunError("a step that preempted admitted too")
        self._held()

    def _held(self) -> None:
        """Counted anew: a sequence holds the blocks of its computed tokens, but for those before its windows."""
        size = self.scenario.limits.block_size
        for sequence in self.scheduler.running:
            done = sequence.computed
            for group, table in zip(self.device.groups, sequence.tables, strict=True):
                gone = 0 if group.window is None else max(0, done - group.window + 1) // size
                if len(table) - table.count(NULL) != -(-done // size) - gone:
                    raise RunError(f"sequence {sequence.id} holds {table} after {done} tokens")

    def _inject(self, work: Work, results: dict[int, Result]) -> Work:
        rows = []
        for row in work.rows:
            arrival = self.by_id[row.sequence.request.id]
            if row.samples and arrival.fail_choice == row.sequence.choice:
                if arrival.fail_by_engine:
                    for event in self.scheduler.fail(row.sequence.id, "found by bisection"):
                        self._finished(event)
                    continue
                results[row.sequence.id] = Result(0, error="non-finite logits")
            rows.append(row)
        return work.subset(rows)

    def _within_limits(self, plan: Plan) -> None:
        limits, scheduler = self.scenario.limits, self.scheduler
        if not plan.rows:
            raise RunError("a step without rows although there is work")
        if sum(row.count for row in plan.rows) > limits.max_batch_tokens:
            raise RunError("the token budget is exceeded")
        if len(scheduler.running) + len(plan.admitted) > limits.max_requests:
            raise RunError("more running than max_requests")
        for row in plan.rows:
            whole = row.start + row.count == len(row.sequence.tokens)
            if row.count < 1 or row.samples != whole:
                raise RunError("a row without tokens, or one that samples before its end")
        if limits.policy in ("fifo", "prefill_first"):
            running = {s.id for s in scheduler.running} | {a.sequence.id for a in plan.admitted}
            running -= {p.sequence.id for p in plan.preempted}
            rest = {s.id for s in scheduler.live()} - running
            if running and rest and max(running) > min(rest):
                raise RunError(f"sequence {max(running)} overtook {min(rest)}")
        self._in_order(plan)
        self._admission_leaves_margin(plan)

    def _in_order(self, plan: Plan) -> None:
        """Rows by kind, the youngest as victims, the first waiting as admitted; written down without the policies."""
        limits, scheduler = self.scenario.limits, self.scheduler
        started = {a.sequence.id for a in plan.admitted}
        first = limits.policy == "prefill_first"
        kinds = [
            2 if r.sequence.id in started else (len(r.sequence.tokens) - r.start == 1) == first
            for r in plan.rows
        ]
        if kinds != sorted(kinds):
            raise RunError(f"rows in the wrong order for {limits.policy}: {kinds}")
        if limits.policy == "fair":
            return

        def place(sequence: Sequence) -> tuple[int, int]:
            return (sequence.request.priority if limits.policy == "priority" else 0, sequence.id)

        victims = {p.sequence.id for p in plan.preempted}
        for older, younger in (
            ([s for s in scheduler.running if s.id not in victims], [p.sequence for p in plan.preempted]),
            ([a.sequence for a in plan.admitted], [s for s in scheduler.waiting if s.id not in started]),
        ):
            if older and younger and max(map(place, older)) > min(map(place, younger)):
                raise RunError(f"{limits.policy}: not the youngest preempted, or not the oldest admitted")

    def _admission_leaves_margin(self, plan: Plan) -> None:
        """All or nothing, counted anew: what the admitted still need fits beside all rows and the margin."""
        cache, limits = self.scheduler.state.cache, self.scenario.limits
        if not plan.admitted or any(g.window is not None for g in cache.groups):
            return
        if not self.scheduler.running and len(plan.admitted) == 1:
            return
        used: set[int] = {u for s in self.scheduler.running for table in s.tables for u in table}
        new = 0
        for row in plan.rows:
            new += -(-(row.start + row.count) // limits.block_size) - -(-row.start // limits.block_size)
        last = plan.admitted[-1]
        for admission in plan.admitted:
            if admission.source == "prefix":
                used |= {u for table in cache.hit(admission.sequence).tables for u in table}
            elif admission.source == "restore":
                new += cache.held(admission.sequence)
            elif admission.start % limits.block_size:
                new += 1
        row = plan.rows[-1]
        rest = -(-len(last.sequence.tokens) // limits.block_size) - -(
            -(row.start + row.count) // limits.block_size
        )
        left = cache.pool.units - len(used) - new - rest
        if left < limits.safety_margin * cache.pool.units:
            raise RunError(
                f"sequence {last.sequence.id} was admitted leaving {left} of {cache.pool.units} units"
            )

    def _token(self, event: Token) -> None:
        sequence = event.sequence
        if sequence.id in self.ended:
            raise RunError(f"sequence {sequence.id}: a token after its end")
        out = self.outcome.delivered.setdefault((sequence.request.id, sequence.choice), [])
        if event.index != len(out):
            raise RunError(f"sequence {sequence.id}: index {event.index} after {len(out)} tokens")
        out.append(event.token)
        if event.finish is not None:
            self._end(sequence, event.finish)

    def _finished(self, event: Finished) -> None:
        self._end(event.sequence, event.reason)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.id in self.ended:
            raise RunError(f"sequence {sequence.id} ended twice")
        self.ended.add(sequence.id)
        self.outcome.finishes[sequence.request.id, sequence.choice] = reason

    def _at_rest(self) -> None:
        stats = self.scheduler.stats()
        if stats.used or stats.running or stats.waiting or stats.free + stats.cached != stats.units:
            raise RunError(f"at rest: {stats}")
        if len(self.scheduler.state.cache.host.free) != self.scenario.limits.offload_units:
            raise RunError("at rest host units are held")
        for arrival in self.scenario.arrivals:
            for choice in range(arrival.request.params.n):
                self._as_alone(arrival, choice)

    def _as_alone(self, arrival: Arrival, choice: int) -> None:
        key = (arrival.request.id, choice)
        tokens, reason = alone(arrival.request, choice)
        got, finish = self.outcome.delivered.get(key, []), self.outcome.finishes.get(key)
        if finish in (FinishReason.ABORT, FinishReason.ERROR):
            asked = arrival.abort_at is not None or arrival.abort_offloaded or arrival.fail_choice == choice
            if not asked or got != tokens[: len(got)]:
                raise RunError(f"{key}: {finish} unasked, or wrong tokens before it")
        elif (got, finish) != (tokens, reason):
            raise RunError(f"{key}: got {got} ({finish}), alone it is {tokens} ({reason})")


def run(scenario: Scenario, make: Callable[..., Scheduler] = Scheduler) -> Outcome:
    return Play(scenario, make).run()


def shrink(scenario: Scenario) -> Scenario:
    """Without the arrivals, aborts and failures that the fault does not need."""
    changed = True
    while changed:
        changed = False
        for i, arrival in enumerate(scenario.arrivals):
            rest = scenario.arrivals[:i], scenario.arrivals[i + 1 :]
            plain = dataclasses.replace(arrival, abort_at=None, fail_choice=None, abort_offloaded=False)
            for smaller in ((), (plain,)):
                if smaller == (arrival,):
                    continue
                candidate = dataclasses.replace(scenario, arrivals=(*rest[0], *smaller, *rest[1]))
                if fails(candidate):
                    scenario, changed = candidate, True
                    break
            if changed:
                break
    return scenario


def fails(scenario: Scenario) -> Exception | None:
    try:
        run(scenario)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the run is for
        return error
    return None
