"""The scheduler: plan → commit → update, and the queues between them.

    plan     decides on counts, changes nothing             (planner.py)
    commit   takes blocks, moves sequences between queues, returns the device's work
    launch   notes that the device computes it, where nobody waits for its tokens at once
    update   appends the sampled tokens, ends sequences, releases their blocks

The scheduler has no separate prefill and decode phases: each step advances ``computed`` towards
``len(tokens)``. Chunked prefill, prefix hits, preemption, resumption and forks all follow from
that. Owns queues and sequences; uses no tensor, clock or randomness.
"""

from array import array
from bisect import bisect_left, insort
from collections import abc
from collections.abc import Iterator, Mapping
from typing import cast

from fairlead_runtime.cache.paged import PagedCache
from fairlead_runtime.request.logprobs import TokenLogprobs
from fairlead_runtime.request.sequence import (
    FINAL,
    PREFILLING,
    Failure,
    FinishReason,
    Request,
    RequestError,
    Sequence,
    Status,
)
from fairlead_runtime.scheduling.admission import refusal
from fairlead_runtime.scheduling.invariants import InvariantViolation, checks
from fairlead_runtime.scheduling.plan import (
    Admission,
    AdmissionSource,
    Event,
    Finished,
    Limits,
    Plan,
    Preemption,
    Result,
    Token,
    Work,
)
from fairlead_runtime.scheduling.planner import State, plan_ahead, plan_step
from fairlead_runtime.scheduling.policies import POLICIES
from fairlead_runtime.scheduling.stats import SchedulerStats, StepStats
from fairlead_runtime.sizing.groups import LayerGroup

__all__ = ["InvariantViolation", "Scheduler", "SchedulerStats", "StepError", "StepStats"]


class StepError(RuntimeError):
    """commit or update got a plan or a result of another step: a bug in the caller."""


class Scheduler:
    """Decides which sequences run in each step and which blocks they use. Not thread-safe: one
    thread owns it.
    """

    def __init__(
        self, limits: Limits, groups: abc.Sequence[LayerGroup], identity: bytes = b""
    ) -> None:
        for name in (
            "max_batch_tokens",
            "max_requests",
            "block_size",
            "num_blocks",
            "max_model_len",
        ):
            if getattr(limits, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(limits, name)}")
        if (bound := limits.prefill_beside_decodes) < 0:
            raise ValueError(f"prefill_beside_decodes: must not be negative, not {bound}")
        self.limits = limits
        cache = PagedCache(
            groups,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_batch_tokens=limits.max_batch_tokens,
            sharing=limits.allow_block_sharing,
            host_units=limits.offload_units,
            identity=identity,
            state_units=limits.state_units,
            state_versions=limits.state_versions,
            shares_answers=limits.shares_answers,
        )
        self.state = State(limits, cache, POLICIES[limits.policy]())
        self._live: dict[int, Sequence] = {}
        self._next_id = 0
        self._preemptions = self._offloads = self._queries = self._hits = 0
        self._preempted_tokens = 0  # of the sequences that wait since a preemption
        self._last = StepStats()

    # -- requests

    def prompt_hashes(
        self, request: Request, pause: abc.Callable[[], None] | None = None
    ) -> bytearray:
        """The digests of its prompt's blocks, for ``add``. Any thread may call it, with a ``pause``
        for the others.
        """
        return self.state.cache.prompt_hashes(request, pause)

    def add(self, request: Request, hashes: bytearray | None = None) -> tuple[Sequence, ...]:
        """Queue a request, one sequence per choice. ``hashes``: its ``prompt_hashes``, which are
        made when it is planned where they are not given. Raises RequestError when it can never run.
        """
        if message := refusal(self.limits, len(request.prompt), request.max_tokens):
            raise RequestError("max_tokens" if request.prompt else "prompt", message)
        if request.id in self.state.siblings:
            raise RequestError("id", f"{request.id!r} is already in use: choose another id")
        params = request.params
        # A grammar's end is marked by an end-of-sequence token.
        eos_stops = not params.ignore_eos or params.guided is not None
        stops = frozenset(params.stop_token_ids) | (request.eos_ids if eos_stops else frozenset())
        siblings: list[Sequence] = []
        prompt = cast("array[int]", request.prompt)  # of all choices until they start
        hashes = bytearray() if hashes is None else hashes  # the same
        self.state.siblings[request.id] = siblings
        for choice in range(params.n):
            sequence = Sequence(
                self._next_id,
                request,
                choice,
                prompt,
                hashes=hashes,
                limit=len(request.prompt) + request.max_tokens,
                stops=stops,
                seniors=len(self._live),
            )
            self._next_id += 1
            self._live[sequence.id] = sequence
            siblings.append(sequence)
            self.state.policy.on_arrival(sequence)
            self.state.policy.push(sequence)
        return tuple(siblings)

    def abort(self, request_id: str, choice: int | None = None) -> list[Finished]:
        """End a request or one of its choices at any moment; on return its blocks are released, or
        once the launched steps that compute it are collected.
        """
        siblings = self.state.siblings.get(request_id, ())
        choices = [s for s in siblings if choice is None or s.choice == choice]
        return [self._end(s, Status.ABORTED, FinishReason.ABORT) for s in choices]

    def fail(self, sequence_id: int, failure: Failure) -> list[Finished]:
        """End one sequence that cannot be computed; no other is affected."""
        sequence = self._live.get(sequence_id)
        return (
            []
            if sequence is None
            else [self._end(sequence, Status.FAILED, FinishReason.ERROR, failure)]
        )

    def reset_cache(self) -> int:
        """Evict every cached unit that no sequence holds; returns their number."""
        return self.state.cache.pool.forget_cached()

    # -- a step

    def plan(self) -> Plan:
        """The next step. Pure: calling it twice gives equal plans."""
        return plan_step(self.state)

    def plan_ahead(self) -> Plan | None:
        """The step after those in flight. It is planned on lengths, which are known before the
        tokens are: a sequence that certainly ends is left out, one that a stop may end is in it.

        None where what is in flight must be collected first: nothing is left to compute, blocks
        must be copied or taken from a sequence, or one that waits could start with the tokens that
        it computes. Pure.
        """
        return plan_ahead(self.state)

    def commit(self, plan: Plan) -> Work:
        """Take the plan's blocks and move its sequences between queues. Raises if the pool cannot
        give all that was planned.
        """
        if plan.step != self.state.step:
            raise StepError(f"plan of step {plan.step} committed in step {self.state.step}")
        cache = self.state.cache
        work = Work(plan.step, list(plan.rows))
        for sequence in plan.blocked:
            if sequence.blocked_since is None:
                sequence.blocked_since = plan.step
        for sequence, hit in plan.looks:
            if sequence.status is Status.PENDING:
                cache.remember(sequence, hit)
        for preemption in plan.preempted:
            self._preempt(preemption, work)
        # Take references before new blocks: taking must not evict the blocks that are shared here.
        for admission in plan.admitted:
            self._start(admission)
        for admission in plan.admitted:
            self._add_copies(admission, work)
        size, prefill, tokens, states = cache.block_size, 0, 0, cache.states
        for sequence, start, count, _ in plan.rows:
            if sequence.planned_length != start or not (sequence.tables or sequence.states):
                raise StepError(
                    f"sequence {sequence.id} has {sequence.computed} tokens computed and "
                    f"{sequence.computed_in_flight} in flight, not {start}"
                )
            if sequence.tables and start + count > len(sequence.tables[0]) * size:
                cache.grow(sequence, start + count)
            if states is not None:
                states.renew(sequence)
            tokens += count
            if count > 1 or (sequence.status is PREFILLING and not sequence.sampled_in_flight):
                prefill += count
        used = cache.pool.units - cache.pool.available
        self._last = StepStats(len(plan.rows), prefill, tokens - prefill, len(plan.preempted), used)
        self.state.step += 1
        return work

    def launch(self, work: Work) -> None:
        """The device has been given these rows; ``update`` takes their tokens, step after step.
        Until then nothing takes blocks from a sequence that they compute.
        """
        for sequence, _, count, samples in work.rows:
            sequence.launch(count, samples=samples)

    def recall(self) -> None:
        """The steps in flight count as not launched: they are computed again, one after another."""
        for sequence in (*self.state.running, *self.state.ended.values()):
            sequence.recall()
        while self.state.ended:
            self._release(self.state.ended.popitem()[1])

    def update(self, work: Work, results: Mapping[int, Result]) -> list[Event]:
        """Record what the device computed. Every row of ``work`` counts as run; each sampling row
        needs a result, but those of sequences that ended since the commit: nobody sees them.
        """
        cache, size = self.state.cache, self.state.cache.block_size
        turns, has_states = cache.turns, cache.states is not None
        events: list[Event] = []
        for sequence, start, count, samples in work.rows:
            if sequence.steps_in_flight:
                sequence.collect(count, samples=samples)
            if sequence.status in FINAL:
                if sequence.id in self.state.ended and not sequence.steps_in_flight:
                    self._release(self.state.ended.pop(sequence.id))
                continue
            if sequence.computed != start:
                raise StepError(
                    f"sequence {sequence.id} has {sequence.computed} tokens computed, not {start}"
                )
            result = results.get(sequence.id)
            if result is not None and (failure := result.failure) is not None:
                events.append(self._end(sequence, Status.FAILED, FinishReason.ERROR, failure))
                continue
            if samples and result is None:
                raise StepError(
                    f"sequence {sequence.id} sampled in step {work.step} but has no result"
                )
            computed = sequence.computed = start + count
            if has_states:
                sequence.turn += 1
            if sequence.scores_prompt:
                sequence.scored = max(sequence.scored, computed)
                if result is not None:
                    sequence.prompt_logprobs += result.prompt
            if count > 1 or computed % size in turns:
                cache.finish_forward(sequence)
            if samples and result is not None:
                events.append(self._append(sequence, result))
        self.state.policy.on_tokens([e.sequence for e in events if type(e) is Token])
        return events

    def _append(self, sequence: Sequence, result: Result) -> Token:
        tokens, request, token = sequence.tokens, sequence.request, result.token
        index = len(tokens) - len(request.prompt)
        tokens.append(token)
        finish = None
        if token in sequence.stops and (
            index + 1 >= request.params.min_tokens
            # Within min_tokens it is allowed only where the grammar allows nothing else.
            or (request.params.guided is not None and token in request.eos_ids)
        ):
            finish = FinishReason.STOP
        elif len(tokens) >= sequence.limit:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._end(sequence, Status.FINISHED, finish)
        elif sequence.status is PREFILLING:
            sequence.move_to(Status.DECODING)
        prompt: tuple[TokenLogprobs, ...] = ()
        if sequence.prompt_logprobs:
            prompt = tuple(sequence.prompt_logprobs)
            sequence.prompt_logprobs.clear()
        return Token(sequence, token, index, result.logprobs, finish, prompt)

    # -- changes of one sequence

    def _preempt(self, preemption: Preemption, work: Work) -> None:
        sequence, offload = preemption
        self._leave_running(sequence)
        if offload:
            work.offload += self.state.cache.offload(sequence)
        else:
            self.state.cache.release(sequence)
        sequence.preemptions += 1
        self._preempted_tokens += len(sequence.tokens)
        sequence.move_to(Status.PENDING)
        self.state.policy.push(sequence)
        self._preemptions += 1
        self._offloads += offload

    def _start(self, admission: Admission) -> None:
        sequence, source, start, sibling, hit = admission
        state = self.state
        sequence.blocked_since = None
        if sequence.preemptions:
            self._preempted_tokens -= len(sequence.tokens)
        else:
            sequence.tokens = sequence.tokens[:]
            sequence.hashes = sequence.hashes[:]
        if source is AdmissionSource.FORK and sibling is not None:
            state.cache.fork(sequence, sibling, start)
        elif source is AdmissionSource.PREFIX:
            if hit is None or hit.version != state.cache.pool.version:
                hit = state.cache.hit(sequence)
            if hit.tokens != start:
                raise StepError(
                    f"sequence {sequence.id}: {hit.tokens} tokens cached, {start} planned"
                )
            state.cache.adopt(sequence, hit)
            if not sequence.preemptions and state.cache.sharing:
                self._queries += len(sequence.tokens)
                self._hits += start
        state.policy.remove(sequence)
        state.policy.on_admission(sequence)
        insort(state.running, sequence, key=state.policy.place)
        decoding = sequence.generated and len(sequence.tokens) - start == 1
        sequence.move_to(Status.DECODING if decoding else PREFILLING)

    def _add_copies(self, admission: Admission, work: Work) -> None:
        if admission.source is AdmissionSource.RESTORE:
            work.restore += self.state.cache.restore(admission.sequence)
        elif admission.source is AdmissionSource.PREFIX:
            self.state.cache.start_states(admission.sequence)
        elif admission.sibling is not None:
            work.copies += self.state.cache.copy_tail(admission.sequence, admission.sibling)

    def _leave_running(self, sequence: Sequence) -> None:
        running, place = self.state.running, self.state.policy.place
        at = bisect_left(running, place(sequence), key=place)
        if at == len(running) or running[at] is not sequence:
            raise StepError(f"sequence {sequence.id} is not running")
        del running[at]

    def _end(
        self,
        sequence: Sequence,
        status: Status,
        reason: FinishReason,
        failure: Failure | None = None,
    ) -> Finished:
        """End a sequence: release its blocks, take it out of its queue, set its final state. Every
        end passes through here.
        """
        if sequence.status is Status.PENDING:
            self.state.policy.remove(sequence)
            self._preempted_tokens -= len(sequence.tokens) if sequence.preemptions else 0
        else:
            self._leave_running(sequence)
        sequence.move_to(status)
        if sequence.steps_in_flight:
            # The device may write to its blocks until that step is collected.
            self.state.ended[sequence.id] = sequence
        else:
            self._release(sequence)
        del self._live[sequence.id]
        siblings = self.state.siblings[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self.state.siblings[sequence.request.id]
        self.state.policy.on_end(sequence)
        return Finished(sequence, reason, failure)

    def _release(self, sequence: Sequence) -> None:
        # The content of a failed sequence may be the cause of the failure: remove its hashes.
        self.state.cache.release(sequence, forget=sequence.status is Status.FAILED)

    # -- inspection

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Running sequences in the policy's order."""
        return tuple(self.state.running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Waiting sequences in the order in which they may start, preempted and offloaded ones
        included.
        """
        return tuple(self.state.policy.candidates())

    def live(self) -> Iterator[Sequence]:
        """All running and waiting sequences, in order of arrival."""
        return iter(self._live.values())

    def stats(self) -> SchedulerStats:
        pool = self.state.cache.pool
        return SchedulerStats(
            running=len(self.state.running),
            prefilling=[s.status for s in self.state.running].count(PREFILLING),
            waiting=len(self.state.policy),
            offloaded=sum(1 for s in self._live.values() if s.host)
            if self.limits.offload_units
            else 0,
            units=pool.units,
            free=len(pool.free),
            cached=len(pool.cached),
            used=pool.units - pool.available,
            preemptions=self._preemptions,
            preempted_tokens=self._preempted_tokens,
            offloads=self._offloads,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            last=self._last,
        )

    def check(self) -> None:
        """Raise InvariantViolation unless all invariants hold. Call it between steps; its time is
        proportional to the cache's size.
        """
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[None]:
        """Check all invariants in short parts, each of which may run between two other steps."""
        return checks(self.state, self._live)
