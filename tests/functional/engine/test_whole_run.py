"""Whole runs of the scheduler under scarce memory: invariants hold after every step, each request
gets the tokens of a run alone, nothing is held at the end.

`make test` plays a thirtieth, FAIRLEAD_FULL=1 the whole: 1,000,000 steps over 2,000 seeds.
"""

import pytest

from support import whole_run
from support.full import LONG_FORM

BATCHES = 4


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_workloads_give_each_request_the_tokens_of_a_run_alone(batch: int) -> None:
    share = (2000 if LONG_FORM else 64) // BATCHES
    total = whole_run.Outcome()
    for seed in range(batch * share, (batch + 1) * share):
        scenario = whole_run.draw(seed)
        try:
            outcome = whole_run.run(scenario)
        except Exception as error:
            smallest = whole_run.shrink(scenario)
            raise AssertionError(
                f"seed {seed}: {error}\nsmallest that fails:\n{smallest}"
            ) from error
        total.count(outcome)
    # A workload without preemptions and prefix hits would test little.
    assert total.steps >= 500 * share
    assert min(total.preemptions, total.offloads, total.forks, total.hits) > 0, total


def test_launched_steps_give_each_request_the_tokens_of_a_run_alone() -> None:
    """Steps are launched before the tokens of the last are known; aborts and failures come while
    they are in flight.
    """
    total = whole_run.Outcome()
    seeds, requests = (2000, 56) if LONG_FORM else (24, 16)
    for seed in range(seeds):
        try:
            outcome = whole_run.run(whole_run.draw(seed, requests), ahead=True)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        total.count(outcome)
    kinds = (total.ahead, total.started, total.dead, total.recalls, total.preemptions)
    assert min(*kinds, total.offloads) > 0, total


def test_requests_behind_a_blocked_one_start_when_the_recount_says_so() -> None:
    first = whole_run.ROOMY
    for seed in range(first, first + (400 if LONG_FORM else 10)):
        whole_run.run(whole_run.draw(seed))
        if not seed % 5:
            whole_run.run(whole_run.draw(seed), ahead=True)


@pytest.mark.parametrize("ahead", [False, True])
def test_sequences_with_states_read_the_state_of_their_own_tokens(ahead: bool) -> None:
    """Layers with keys of all kinds or none beside states, in memory for little more than one
    sequence. Each step is computed again, whole and in halves.
    """
    total = whole_run.Outcome()
    seeds = 1000 if LONG_FORM else 24
    for seed in range(seeds):
        try:
            outcome = whole_run.run(whole_run.draw_states(seed, 24), ahead=ahead)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        total.count(outcome)
    kinds = [total.preemptions, total.offloads, total.hits]
    assert min(*kinds, *([total.ahead, total.recalls] if ahead else [])) > 0, total
