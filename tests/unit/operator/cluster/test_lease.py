"""Leader election against a small API with resourceVersions: at no moment do two processes hold the
Lease.
"""

import asyncio
import copy
import random
from datetime import UTC, datetime, timedelta

import pytest

from fairlead_operator.cluster.lease import DURATION, FENCE, RENEW, Election
from fairlead_operator.errors import ApiError
from fairlead_operator.resource.kinds import LEASE, Key, Kind, Object


class Api:
    """One Lease with conflicts; ``fail`` loses the next answers, after the write or before it."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.version = 0
        self.fail: list[str] = []

    async def get(self, kind: Kind, key: Key) -> Object | None:
        assert kind is LEASE
        if self.fail and self.fail[0] == "get":
            self.fail.pop(0)
            raise ApiError(503, "Unavailable", "")
        return copy.deepcopy(self.lease)

    async def write_lease(self, kind: Kind, key: Key, lease: Object) -> Object:
        fault = self.fail.pop(0) if self.fail else ""
        if fault == "before":
            raise ApiError(0, "NoAnswer", "reset")
        held = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if lease["metadata"].get("resourceVersion") != held:
            raise ApiError(409, "Conflict", "the object has been modified")
        self.version += 1
        self.lease = copy.deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        if fault == "after":
            raise ApiError(0, "NoAnswer", "reset")
        return copy.deepcopy(self.lease)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now)


def election(api: Api, clock: Clock, identity: str, serves: str = "") -> Election:
    return Election(api, "ns", identity, serves=serves, clock=clock.monotonic, now=clock.wall)


def step(one: Election) -> None:
    async def quietly() -> None:
        try:
            await one.step()
        except ApiError:
            return

    asyncio.run(quietly())


def test_the_first_takes_it_and_the_second_waits() -> None:
    api, clock = Api(), Clock()
    a, b = election(api, clock, "a"), election(api, clock, "b")
    step(a)
    step(b)
    assert (a.holds(), b.holds()) == (True, False)


def test_a_restarted_holder_resumes_at_once() -> None:
    api, clock = Api(), Clock()
    step(election(api, clock, "a"))
    again = election(api, clock, "a")
    step(again)
    assert again.holds()


def test_another_takes_over_only_after_a_whole_duration_without_renewal() -> None:
    api, clock = Api(), Clock()
    a, b = election(api, clock, "a"), election(api, clock, "b")
    step(a)
    step(b)
    clock.now += DURATION - 1
    step(b)
    assert not b.holds()
    clock.now += 2
    step(b)
    assert b.holds()
    assert not a.holds(), "its fence fell before"
    assert FENCE < DURATION


def test_a_holder_that_leaves_gives_it_up_and_the_next_need_not_wait() -> None:
    api, clock = Api(), Clock()
    a, b = election(api, clock, "a"), election(api, clock, "b")
    step(a)
    step(b)
    asyncio.run(a.release())
    assert not a.holds()
    step(b)
    assert b.holds()


def test_a_holder_whose_name_is_used_by_another_stands_down() -> None:
    api, clock = Api(), Clock()
    a = election(api, clock, "same")
    step(a)
    clock.now += 0.5
    twin = election(api, clock, "same")
    step(twin)
    assert twin.holds()
    clock.now += 0.5
    step(a)
    assert not a.holds()
    for _ in range(20):
        clock.now += 2
        step(a)
        step(twin)
        assert (a.holds(), twin.holds()) == (False, True)


@pytest.mark.parametrize("fault", ["before", "after"])
def test_a_lost_answer_is_no_reason_to_lose_the_lease(fault: str) -> None:
    api, clock = Api(), Clock()
    a = election(api, clock, "a")
    step(a)
    clock.now += RENEW
    api.fail = [fault]
    step(a)
    assert a.holds()
    step(a)  # after a write that was kept: the conflict
    step(a)
    assert a.holds()


def test_the_first_of_all_the_writes_of_a_long_outage_is_still_known_as_its_own() -> None:
    """An API server that stood still for minutes commits the oldest write it was sent and refuses
    the others.
    """
    api, clock = Api(), Clock()
    holder = election(api, clock, "a")
    step(holder)
    late = []
    for _ in range(50):
        clock.now += 12
        api.fail = ["before"]
        step(holder)
        late.append(clock.wall().strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
    assert not holder.holds()
    assert api.lease is not None
    api.version += 1
    api.lease["spec"]["renewTime"] = late[0]
    api.lease["metadata"]["resourceVersion"] = str(api.version)
    step(holder)  # its next renewal is a conflict
    step(holder)
    assert holder.holds(), "it need not wait until its own Lease runs out"


def test_a_holder_that_cannot_renew_stops_writing_before_others_may_start() -> None:
    api, clock = Api(), Clock()
    a = election(api, clock, "a")
    step(a)
    for _ in range(3):
        clock.now += RENEW
        api.fail = ["before"]
        step(a)
    assert not a.holds()


@pytest.mark.parametrize("seed", range(20))
def test_under_random_faults_and_pauses_there_are_never_two_and_soon_one(seed: int) -> None:
    rng = random.Random(seed)
    api, clock = Api(), Clock()
    electors = [election(api, clock, name) for name in ("a", "b", "c")]
    for _ in range(200):
        clock.now += rng.uniform(0.5, 3)
        one = rng.choice(electors)
        api.fail = [rng.choice(["before", "after", "get"])] if rng.random() < 0.3 else []
        step(one)
        assert sum(e.holds() for e in electors) <= 1
    api.fail = []
    for _ in range(12):
        clock.now += 2
        for one in electors:
            step(one)
    assert sum(e.holds() for e in electors) == 1


def test_a_renewal_counts_from_the_moment_it_was_sent() -> None:
    """The server may have stored it then; only an earlier fence is safe."""

    class SlowApi(Api):
        async def write_lease(self, kind: Kind, key: Key, lease: Object) -> Object:
            answer = await super().write_lease(kind, key, lease)
            clock.now += FENCE - 1
            return answer

    api, clock = SlowApi(), Clock()
    a = election(api, clock, "a")
    step(a)
    assert a.holds()
    clock.now += 2
    assert not a.holds()


def test_a_lapse_that_ends_with_the_next_renewal_is_reported() -> None:
    """Passes that begin in a lapse are left out, so that whoever runs them must hear of its end."""
    clock, reports, held = Clock(), list[bool](), list[bool]()

    class SlowApi(Api):
        async def write_lease(self, kind: Kind, key: Key, lease: Object) -> Object:
            clock.now += FENCE * 0.6 if self.version < 2 else 0
            held.append(one.holds())
            if self.version == 3:
                raise asyncio.CancelledError
            return await super().write_lease(kind, key, lease)

    one = election(SlowApi(), clock, "a")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(one.run(reports.append, beat=0.0))
    assert held == [False, False, True, True], "the first renewal came too late"
    assert reports == [True, True]


def test_the_fence_leaves_a_renewal_that_hangs_room_before_another_may_start() -> None:
    """A write that was admitted just before the fence may take as long as a renewal's pause."""
    assert FENCE + RENEW <= DURATION
    assert 2 * RENEW <= FENCE, "one lost renewal does not end the leadership"


def test_a_second_release_with_another_scope_says_once_whom_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api, clock = Api(), Clock()
    step(election(api, clock, "a", "one"))
    standby, other = election(api, clock, "b", "one"), election(api, clock, "c", "two")
    for _ in range(2):
        step(standby)
    assert caplog.messages == []
    for _ in range(2):
        step(other)
    (message,) = caplog.messages
    assert message == (
        "the Lease ns/fairlead-operator is held by a, which serves one; this operator serves two "
        "and waits: install the second release in a namespace of its own"
    )
