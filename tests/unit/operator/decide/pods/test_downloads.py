"""Download progress in the status: which answers count, how they read, how rarely they change."""

from typing import Any

import pytest

from fairlead_operator.decide.pods.downloads import (
    SHOW_SECONDS,
    Download,
    fetching,
    messages,
    read,
    show,
)
from support.operator_bodies import Object, pod

GIB = 1 << 30
RUNNING = {"name": "fetch", "state": {"running": {}}}


def test_the_message_has_percentage_and_bytes() -> None:
    assert (
        str(Download(5 * GIB // 4, 3 * GIB)) == "41 % of the weights are there: 1.2 GiB of 3.0 GiB"
    )
    assert str(Download(0, 1000)) == "0 % of the weights are there: 0 B of 1000 B"
    assert str(Download(2048, 2048)) == "100 % of the weights are there: 2.0 KiB of 2.0 KiB"
    assert str(Download(1 << 60, 1 << 60)).endswith("1024.0 PiB of 1024.0 PiB")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"done_bytes": 0, "total_bytes": 0},
        {"done_bytes": 2, "total_bytes": 1},
        {"done_bytes": -1, "total_bytes": 1},
        {"done_bytes": 1.0, "total_bytes": 2},
        {"done_bytes": True, "total_bytes": 2},
        {"done_bytes": "1", "total_bytes": 2},
        {"done_bytes": 1, "total_bytes": 1 << 61},
    ],
)
def test_an_answer_that_cannot_be_true_is_none(answer: Object) -> None:
    assert read(answer) is None


def test_a_good_answer_is_read() -> None:
    assert read({"model": "m", "done_bytes": 1, "total_bytes": 2, "percent": 50}) == Download(1, 2)


def test_what_is_shown_moves_by_tenths_and_at_most_every_30_seconds() -> None:
    shown = show({}, {"a": Download(5, 100)}, float("inf"))
    assert shown == {"a": Download(5, 100)}
    assert show(shown, {"a": Download(9, 100)}, 1000) is shown, "too little"
    assert show(shown, {"a": Download(90, 100)}, SHOW_SECONDS - 0.1) is shown, "too soon"
    assert show(shown, {"a": Download(10, 100)}, SHOW_SECONDS) == {"a": Download(10, 100)}
    assert show(shown, {"a": Download(6, 200)}, SHOW_SECONDS) == {"a": Download(6, 200)}, (
        "there is more to come"
    )


def test_a_day_of_slow_downloads_costs_few_writes() -> None:
    """Eight pods, each a percent every four minutes, looked at every five seconds."""
    shown: Any = {}
    at, writes = float("-inf"), 0
    for second in range(0, 86_400, 5):
        now = {f"pod-{n}": Download(min(1000, second // 24 + 7 * n), 1000) for n in range(8)}
        after = show(shown, now, second - at)
        if after is not shown:
            shown, at, writes = after, second, writes + 1
    assert writes <= 8 * 10 + 1
    assert all(one.percent == 100 for one in shown.values())


def test_only_pods_whose_fetch_container_runs_are_asked() -> None:
    ended = {"name": "fetch", "state": {"terminated": {"exitCode": 0}}}
    pods = [
        pod("a", init=RUNNING),
        pod("b", init=ended),
        pod("c"),
        pod("d", init=RUNNING, deleting=True),
    ]
    assert [one["metadata"]["name"] for one in fetching(pods)] == ["a"]


def test_after_a_restart_the_message_of_the_status_stands_until_the_pod_answers() -> None:
    one, other = pod("a", init=RUNNING), pod("b", init=RUNNING)
    said = {"code": "FetchingWeights", "object": "Pod/a", "message": "40 % ..."}
    failed = {"code": "ModelNotFound", "object": "Pod/b", "message": "no"}
    before = {"blockers": [said, failed]}
    assert messages({}, [one, other], before) == {"uid-of-a": "40 % ..."}
    news = {"uid-of-a": Download(1, 2)}
    assert messages(news, [one, other], before) == {"uid-of-a": str(Download(1, 2))}
    assert messages({}, [pod("a", ready=True)], before) == {}
