"""The parts of a start: which there are, where each comes from, and that they stand still
afterwards.
"""

from fairlead_operator.decide.pods.startup import read, startup
from support.operator_bodies import Object, pod

MEASURED = {"uid-of-chat-1": {"imports": 3.2, "selfTest": 1.5}}


def at(seconds: int) -> str:
    return f"2026-01-01T00:{seconds // 60:02}:{seconds % 60:02}Z"


def started(
    name: str = "chat-1", *, restarts: int = 0, retries: int | None = None, created: int = 0
) -> Object:
    """Scheduled after 2 s, the image there 5 s later; ``retries`` of a download that took 40 s,
    None for no download.
    """
    fetch = None
    if retries is not None:
        ended = {"exitCode": 0, "startedAt": at(7), "finishedAt": at(47)}
        fetch = {"name": "fetch", "restartCount": retries, "state": {"terminated": ended}}
    running = {"running": {"startedAt": at(7 if fetch is None else 48)}}
    one = pod(
        name,
        ready=True,
        conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": at(2)}],
        container={"name": "runtime", "restartCount": restarts, "state": running},
        init=fetch,
    )
    one["metadata"]["creationTimestamp"] = at(created)
    return one


def test_every_part_of_a_start_with_a_download() -> None:
    assert startup([started(retries=0)], MEASURED, {}) == {
        "scheduled": 2,
        "imagePulled": 5,
        "weightsFetched": 40,
        "imports": 3.2,
        "selfTest": 1.5,
    }


def test_a_start_without_a_download_fetched_nothing() -> None:
    assert startup([started()], MEASURED, {}) == {
        "scheduled": 2,
        "imagePulled": 5,
        "imports": 3.2,
        "selfTest": 1.5,
    }


def test_when_the_first_container_started_is_not_known_of_a_download_that_was_tried_again() -> None:
    assert set(startup([started(retries=2)], MEASURED, {})) == {
        "scheduled",
        "weightsFetched",
        "imports",
        "selfTest",
    }


def test_a_container_started_again_has_the_runtimes_parts_only() -> None:
    assert startup([started(restarts=1, retries=0)], MEASURED, {}) == {
        "imports": 3.2,
        "selfTest": 1.5,
    }


def test_it_is_the_newest_pods_whichever_order_they_come_in() -> None:
    old, new, twin = started("chat-1"), started("chat-2", created=1), started("chat-3", created=1)
    measured = {
        "uid-of-chat-1": {"weights": 1.0},
        "uid-of-chat-2": {"weights": 2.0},
        "uid-of-chat-3": {"weights": 3.0},
    }
    assert (
        startup([new, old], measured, {})["weights"]
        == startup([old, new], measured, {})["weights"]
        == 2.0
    )
    assert (
        startup([twin, new], measured, {})["weights"]
        == startup([new, twin], measured, {})["weights"]
        == 3.0
    )


def test_the_last_parts_stay_while_the_newest_pod_has_none_or_none_serves() -> None:
    before = {"scheduled": 9, "weights": 8.0}
    assert startup([started()], {}, before) == before
    assert startup([], MEASURED, before) == before
    assert startup([started()], {"uid-of-chat-1": {}}, before) == {"scheduled": 2, "imagePulled": 5}


def test_parts_as_an_older_operator_named_them_do_not_stay() -> None:
    before = {"scheduled": 9, "loaded": 8.0, "warmed": 2.0}
    assert startup([], MEASURED, before) == startup([started()], {}, before) == {"scheduled": 9}


def test_missing_or_impossible_series_give_no_parts() -> None:
    line = 'fairlead_startup_seconds{{model_name="{}",engine="0",phase="{}"}} {}\n'
    good = line.format("chat", "kernels", 3.21) + line.format("chat", "self_test", 0.96)
    assert read(good, "chat") == {"kernels": 3.2, "selfTest": 1.0}
    assert read(good, "other") == read("", "chat") == {}
    bad = (
        line.format("chat", "weights", "NaN")
        + line.format("chat", "self_test", -1)
        + line.format("chat", "x", 1)
    )
    assert read(bad, "chat") == {}
    assert read(line.format("chat", "weights", "+Inf"), "chat") == {}
    assert read("fairlead_startup_seconds{ 1\n", "chat") == {}
