"""What the composition root sets for the whole process."""

import pytest
import torch

from fairlead_runtime.start import build


@pytest.mark.parametrize(
    ("cpus", "others", "cached", "ranks", "threads"),
    [
        (1, True, False, 1, 1),
        (1, True, True, 1, 1),
        (2, True, False, 1, 2),
        (2, True, True, 1, 1),
        (2, False, True, 1, 2),
        (3, True, False, 1, 2),
        (8, True, False, 1, 7),
        (8, True, True, 1, 7),
        (8, False, False, 1, 8),
        (64, True, False, 1, 31),
        (8, True, False, 2, 3),
        (2, True, False, 4, 1),
    ],
)
def test_one_of_more_than_two_threads_is_left_to_the_http_process_and_of_two_for_small_models(
    cpus: int,
    others: bool,
    cached: bool,
    ranks: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(build, "cpu_limit", lambda: cpus)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)  # torch counts cores, not CPUs
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    build._limit_threads(others=others, cached=cached, ranks=ranks)
    assert chosen == [threads]


def test_a_number_of_threads_that_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "set_num_threads", pytest.fail)
    build._limit_threads(others=True, cached=False, ranks=1)
