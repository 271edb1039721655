"""The order of service, one class per policy.

Owns the waiting queue; reads no blocks and no budgets.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType

from fairlead_runtime.request.sequence import Sequence
from fairlead_runtime.settings.engine_config import SchedulerType

Rank = tuple[int, ...]
NOTHING: Mapping[int, int] = MappingProxyType({})


class Fifo:
    """Arrival order. A step serves decodes, then running prefills, then waiting sequences."""

    prefills_first = False

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def place(self, sequence: Sequence) -> Rank:
        """The sequence's sort key among running and among waiting sequences; never changes."""
        return (sequence.id,)

    def rank(self, sequence: Sequence) -> Rank:
        """The sequence's sort key for preemption; the highest is preempted first."""
        return self.place(sequence)

    def push(self, sequence: Sequence) -> None:
        insort(self._queue, sequence, key=self.place)

    def remove(self, sequence: Sequence) -> None:
        _remove(
            self._queue, sequence, bisect_left(self._queue, self.place(sequence), key=self.place)
        )

    def candidates(
        self,
        blocked: Container[int] = (),  # noqa: ARG002 - Fair reads it
        cached: Mapping[int, int] = NOTHING,  # noqa: ARG002 - Fair reads it
    ) -> Iterator[Sequence]:
        """Waiting sequences in the order in which they may start, as if each one started.

        Before it asks for the next one the caller may add the id of the last one to ``blocked``:
        the sequence lacks blocks; or to ``cached``, with the tokens that it found in the cache.
        """
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    # The scheduler calls these on each change, so that planning stays pure.

    def on_arrival(self, sequence: Sequence) -> None:
        """The sequence has arrived; ``push`` follows."""

    def on_admission(self, sequence: Sequence) -> None:
        """The sequence has started or resumed; ``computed`` counts the tokens that it found."""

    def on_tokens(self, sequences: Iterable[Sequence]) -> None:
        """Each of the sequences got one new token."""

    def on_end(self, sequence: Sequence) -> None:
        """The sequence finished, failed or was aborted."""


class PrefillFirst(Fifo):
    """Arrival order. Running prefills finish before decodes continue."""

    prefills_first = True


class Priority(Fifo):
    """Lower ``priority`` first, then arrival."""

    def place(self, sequence: Sequence) -> Rank:
        return (sequence.request.priority, sequence.id)


class Fair(Fifo):
    """Fair sharing among tenants with equal weights: the Virtual Token Counter of Sheng et al.,
    OSDI 2024.

    Each tenant has a counter of the service it received: 1 for a prompt token that was not cached,
    charged when the sequence starts, 2 for a generated token. The tenant with the smallest counter
    starts next, the one with the largest is preempted first. When an idle tenant returns, its
    counter is raised to the smallest of the other tenants, so that idle time earns no credit.
    """

    prompt_cost, output_cost = 1, 2

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, list[Sequence]] = {}  # of tenants with waiting sequences
        self._counters: dict[str, int] = {}
        self._live: dict[str, int] = {}  # sequences that wait or run, by tenant
        self._floor = 0  # the least counter of a tenant that returns when no other is live

    def rank(self, sequence: Sequence) -> Rank:
        return (self._counters[sequence.request.tenant], sequence.id)

    def push(self, sequence: Sequence) -> None:
        insort(self._queues.setdefault(sequence.request.tenant, []), sequence, key=self.place)

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.request.tenant]
        _remove(queue, sequence, bisect_left(queue, self.place(sequence), key=self.place))
        if not queue:
            del self._queues[sequence.request.tenant]

    def candidates(
        self, blocked: Container[int] = (), cached: Mapping[int, int] = NOTHING
    ) -> Iterator[Sequence]:
        """A tenant with a blocked sequence comes after all tenants without one."""
        heads = [
            (False, self._counters[tenant], queue[0].id, tenant, 0)
            for tenant, queue in self._queues.items()
        ]
        heapq.heapify(heads)
        while heads:
            last, counter, _, tenant, at = heads[0]
            queue = self._queues[tenant]
            yield queue[at]
            last = last or queue[at].id in blocked
            counter += self._start_cost(queue[at], cached.get(queue[at].id, 0))
            if at + 1 < len(queue):
                heapq.heapreplace(heads, (last, counter, queue[at + 1].id, tenant, at + 1))
            else:
                heapq.heappop(heads)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def on_arrival(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if tenant not in self._live:
            counters = [self._counters[t] for t in self._live]
            self._floor = max(self._floor, min(counters)) if counters else self._floor
            self._counters[tenant] = max(self._counters.get(tenant, 0), self._floor)
            # Drop the counters of idle tenants that the floor has reached: they no longer matter.
            if len(self._counters) > 2 * len(self._live) + 64:
                keep = {
                    t: c for t, c in self._counters.items() if c > self._floor or t in self._live
                }
                self._counters = keep | {tenant: self._counters[tenant]}
        self._live[tenant] = self._live.get(tenant, 0) + 1

    def on_admission(self, sequence: Sequence) -> None:
        cost = self._start_cost(sequence, sequence.computed)
        self._counters[sequence.request.tenant] += cost

    def on_tokens(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._counters[sequence.request.tenant] += self.output_cost

    def on_end(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
            if not self._live:
                self._floor = max(self._floor, self._counters[tenant])

    def _start_cost(self, sequence: Sequence, cached: int) -> int:
        """The charge for a prompt of which so many tokens are cached. Choices share their prompt
        and a preempted sequence has paid already: each prompt is charged once.
        """
        if sequence.preemptions or sequence.choice:
            return 0
        return self.prompt_cost * (sequence.prompt_len - cached)


def _remove(queue: list[Sequence], sequence: Sequence, at: int) -> None:
    if at == len(queue) or queue[at] is not sequence:
        raise RuntimeError(f"sequence {sequence.id} is not waiting")
    del queue[at]


POLICIES: dict[SchedulerType, type[Fifo]] = {
    "fifo": Fifo,
    "prefill_first": PrefillFirst,
    "priority": Priority,
    "fair": Fair,
}
