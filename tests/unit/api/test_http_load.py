"""What the HTTP process measures of itself."""

import asyncio

import pytest

from fairlead_runtime.api.ports import server
from fairlead_runtime.api.state.http_load import LAG_SECONDS, HttpLoad
from fairlead_runtime.api.state.state import ServerState
from fairlead_runtime.front.limits import PromptPool
from fairlead_runtime.settings.engine_config import ConfigError
from fairlead_runtime.sizing.traffic import Bound, files_of


def test_the_lag_of_the_event_loop_is_what_a_wake_up_comes_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = [0.0, 0.3, 2.0]

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        now = 100.0
        monkeypatch.setattr(loop, "time", lambda: now)

        async def sleep(seconds: float) -> None:
            nonlocal now
            if not late:
                raise asyncio.CancelledError
            now += seconds + late.pop(0)

        load = HttpLoad(PromptPool(), {})
        with pytest.raises(asyncio.CancelledError):
            await load.watch_loop(sleep)
        assert load.loop_lag.sum == pytest.approx(2.3)
        assert sum(load.loop_lag.counts) == 3
        # Up to 0.001, 0.5 and 2.5 seconds.
        assert [i for i, count in enumerate(load.loop_lag.counts) if count] == [0, 8, 10]

    assert LAG_SECONDS < 1
    asyncio.run(scenario())


def test_bytes_count_while_they_are_held() -> None:
    pool = PromptPool()
    state = ServerState(name="m", load=HttpLoad(pool, {"public": lambda: 3, "admin": lambda: 0}))
    with pool.bodies.hold() as body, pool.answers.hold() as answer:
        body(100)
        body(20)
        answer(7)
        front = state.front()
        assert (front.body_bytes, front.logprob_bytes) == (120, 7)
        assert front.connections == {"public": 3, "admin": 0}
    front = state.front()
    assert (front.body_bytes, front.logprob_bytes) == (0, 0)


def test_a_server_that_may_open_too_few_files_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound, allowed = Bound(2048, "at least"), [512, None, 511]
    monkeypatch.setattr(server, "allow_files", lambda _: allowed.pop(0))
    assert server._port_bounds(bound).files == 512
    assert server._port_bounds(bound).files == files_of(2048)
    message = r"--port: the server may open 511 files and needs 512 at least \(raise .*ulimit -Hn"
    with pytest.raises(ConfigError, match=message):
        server._port_bounds(bound)
