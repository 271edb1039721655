"""Who comes first: one small type per policy. Owns the waiting queue; never looks at blocks or
budgets.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from fairlead_runtime.config import SchedulerType
from fairlead_runtime.request import Sequence

Rank = tuple[int, ...]


class Fifo:
    """Arrival order; decodes before running prefills before waiting ones."""

    prefills_first = False

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def place(self, sequence: Sequence) -> Rank:
        """Its place among running and among waiting ones; never changes."""
        return (sequence.id,)

    def rank(self, sequence: Sequence) -> Rank:
        """Seniority: the highest is preempted first."""
        return self.place(sequence)

    def push(self, sequence: Sequence) -> None:
        insort(self._queue, sequence, key=self.place)

    def remove(self, sequence: Sequence) -> None:
        _remove(
            self._queue, sequence, bisect_left(self._queue, self.place(sequence), key=self.place)
        )

    def candidates(self) -> Iterator[Sequence]:
        """Waiting ones in the order in which they may start. Asking for the next tells that the
        last one did.
        """
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    # What a policy may count; called as things happen, so that planning stays pure.

    def on_arrival(self, sequence: Sequence) -> None:
        """It came, and is about to be pushed."""

    def on_admission(self, sequence: Sequence) -> None:
        """It starts or resumes."""

    def on_tokens(self, sequences: Iterable[Sequence]) -> None:
        """Each got one more token."""

    def on_end(self, sequence: Sequence) -> None:
        """It finished, failed or was aborted."""


class PrefillFirst(Fifo):
    """Arrival order; chunked prefills finish before decodes go on."""

    prefills_first = True


class Priority(Fifo):
    """Lower ``priority`` first, then arrival."""

    def place(self, sequence: Sequence) -> Rank:
        return (sequence.request.priority, sequence.id)


class Fair(Fifo):
    """Weighted fair sharing among tenants, equal weights: the Virtual Token Counter of Sheng et
    al., OSDI 2024.

    Each tenant has a counter of service received: 1 a prompt token, charged when it starts, 2 a
    generated token. The smallest counter starts next, the largest is preempted first. A tenant that
    was idle is lifted to the smallest counter among the others, so that nobody saves up credit by
    staying away.
    """

    prompt_cost, output_cost = 1, 2

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, list[Sequence]] = {}  # of tenants with something waiting
        self._counters: dict[str, int] = {}
        self._live: dict[str, int] = {}  # sequences that wait or run, by tenant
        self._floor = 0  # what an idle tenant's counter is lifted to when nobody else is there

    def rank(self, sequence: Sequence) -> Rank:
        return (self._counters[sequence.request.tenant], sequence.id)

    def push(self, sequence: Sequence) -> None:
        insort(self._queues.setdefault(sequence.request.tenant, []), sequence, key=self.place)

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.request.tenant]
        _remove(queue, sequence, bisect_left(queue, self.place(sequence), key=self.place))
        if not queue:
            del self._queues[sequence.request.tenant]

    def candidates(self) -> Iterator[Sequence]:
        heads = [
            (self._counters[tenant], queue[0].id, tenant, 0)
            for tenant, queue in self._queues.items()
        ]
        heapq.heapify(heads)
        while heads:
            counter, _, tenant, at = heads[0]
            queue = self._queues[tenant]
            yield queue[at]
            counter += self._start_cost(queue[at])
            if at + 1 < len(queue):
                heapq.heapreplace(heads, (counter, queue[at + 1].id, tenant, at + 1))
            else:
                heapq.heappop(heads)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def on_arrival(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if tenant not in self._live:
            others = [self._counters[t] for t in self._live]
            self._floor = max(self._floor, min(others)) if others else self._floor
            self._counters[tenant] = max(self._counters.get(tenant, 0), self._floor)
            if (
                len(self._counters) > 2 * len(self._live) + 64
            ):  # the floor has overtaken most idle ones
                keep = {
                    t: c for t, c in self._counters.items() if c > self._floor or t in self._live
                }
                self._counters = keep | {tenant: self._counters[tenant]}
        self._live[tenant] = self._live.get(tenant, 0) + 1

    def on_admission(self, sequence: Sequence) -> None:
        self._counters[sequence.request.tenant] += self._start_cost(sequence)

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

    def _start_cost(self, sequence: Sequence) -> int:
        """Choices share their prompt, and a preemption is not the tenant's doing: both are charged
        once.
        """
        if sequence.preemptions or sequence.choice:
            return 0
        return self.prompt_cost * sequence.prompt_len


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
