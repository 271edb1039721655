"""The drain's order and what undoes it, on a service that records its calls."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fairlead_runtime.api.state.state import Backend, ServerState
from fairlead_runtime.front.drain import Drain
from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.outputs import DrainResult, Health


class RecordingService:
    """``drains``: the most seconds that each drain may wait. ``limits``: with those waited before,
    as its error names them.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.drains: list[float] = []
        self.limits: list[float] = []
        self.state = Health(alive=True, ready=True)

    def begin_drain(self) -> None:
        self.calls.append("begin")

    def refuse_new(self) -> None:
        self.calls.append("refuse")

    def resume(self) -> None:
        self.calls.append("resume")

    def health(self) -> Health:
        return self.state

    async def drain(self, max_wait: float, waited: float = 0.0) -> DrainResult:
        self.drains.append(max_wait)
        self.limits.append(max_wait + waited)
        return DrainResult(2, 1)


def loaded() -> tuple[ServerState, RecordingService]:
    state, service = ServerState(name="tiny"), RecordingService()
    state.attach(cast("Backend", SimpleNamespace(service=service)))
    return state, service


def run(scenario: Any) -> None:
    asyncio.run(scenario())


def test_a_drain_ends_readiness_at_once_and_refuses_after_its_grace() -> None:
    async def scenario() -> None:
        state, service = loaded()
        drain = Drain(state, grace=0.01, timeout=9.0)
        assert state.health().ready
        task = drain.begin()
        assert drain.begin() is task, "one drain, however often it is asked for"
        assert not state.health().ready
        assert await task == DrainResult(2, 1)
        with pytest.raises(ApiError) as refusal:
            state.serving()
        assert refusal.value.code == "draining"
        assert service.calls == ["begin", "begin"]
        assert service.drains == [pytest.approx(9.0, abs=1.0)]

    run(scenario)


def test_a_request_that_was_accepted_in_the_grace_is_waited_for() -> None:
    """Its body is still read, or its prompt prepared: the service has not seen it."""

    async def scenario() -> None:
        state, service = loaded()
        with state.request() as accepted:
            task = Drain(state, grace=0.0, timeout=3600.0).begin()
            for _ in range(10):
                await asyncio.sleep(0)
            with pytest.raises(ApiError, match="shutting down"), state.request():
                pass
            assert service.calls == ["begin"]
            assert service.drains == []
            assert accepted is state.backend
        assert await task == DrainResult(2, 1)
        assert len(service.drains) == 1

    run(scenario)


def test_an_accepted_request_that_outlives_the_timeout_does_not_hold_the_drain() -> None:
    async def scenario() -> None:
        state, service = loaded()
        with state.request():
            assert await Drain(state, grace=0.0, timeout=0.0).begin() == DrainResult(2, 1)
        assert service.drains == [0.0]

    run(scenario)


def test_new_requests_are_served_for_the_whole_grace() -> None:
    async def scenario() -> None:
        state, service = loaded()
        drain = Drain(state, grace=3600.0, timeout=9.0)
        task = drain.begin()
        for _ in range(10):
            await asyncio.sleep(0)
        assert state.serving() is state.backend
        assert service.calls == ["begin"]
        drain.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(scenario)


def test_a_cut_ends_the_grace_and_waits_for_no_stream() -> None:
    async def scenario() -> None:
        state, service = loaded()
        drain = Drain(state, grace=3600.0, timeout=9.0)
        task = drain.begin()
        assert await drain.cut() == DrainResult(2, 1)
        assert service.drains == [0.0]
        assert state.refusing
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    run(scenario)


def test_a_drain_can_be_undone_until_a_signal_ends_the_process() -> None:
    async def scenario() -> None:
        state, service = loaded()
        drain = Drain(state, grace=3600.0, timeout=9.0)
        first = drain.begin()
        drain.undo()
        assert state.health().ready
        assert service.calls == ["begin", "resume"]
        second = drain.begin(process_ends=True)
        assert second is not first
        drain.begin()  # POST /drain after the signal
        with pytest.raises(ApiError) as refusal:
            drain.undo()
        assert refusal.value.status == 409
        assert not state.health().ready
        drain.cancel()
        await asyncio.gather(first, second, return_exceptions=True)

    run(scenario)


def test_a_drain_while_the_model_loads_ends_nothing_and_holds_for_what_is_loaded() -> None:
    async def scenario() -> None:
        state, service = ServerState(name="tiny"), RecordingService()
        drain = Drain(state, grace=0.0, timeout=9.0)
        assert await drain.begin() == DrainResult(0, 0)
        state.attach(cast("Backend", SimpleNamespace(service=service)))
        assert service.calls == ["begin", "refuse"]
        assert not state.health().ready

    run(scenario)


def test_health_keeps_the_engines_own_reason_while_draining() -> None:
    state, service = loaded()
    service.state = Health(alive=True, ready=False, reason="no step for 7 s")
    state.begin_drain()
    assert state.health().reason == "no step for 7 s"


def test_a_cut_names_the_whole_timeout_when_requests_that_came_before_used_it_up() -> None:
    async def scenario() -> None:
        state, service = loaded()
        with state.request():
            await Drain(state, grace=0.0, timeout=0.05).begin()
        assert service.drains == [0.0]
        assert service.limits == [0.05]

    run(scenario)
