"""The autoscaler on real load: pods come with the queue and go after it, and nothing is lost."""

import time

import pytest

from cluster.harness.apiclient import eventually
from e2e.harness.figures import Figures
from e2e.harness.installation import Installation
from e2e.harness.load import Client
from e2e.harness.served import SMALL, serving
from support.full import LONG_FORM
from support.looks import Looks

pytestmark = pytest.mark.e2e
QUICK = {  # as small as the tests can wait for
    "minReplicas": 1,
    "maxReplicas": 3,
    # Over minutes, short streams on busy cores leave gaps of 10 s: the autoscaler would follow
    # them, and after some turns it would keep its pods for an hour.
    "scaleDown": {"stabilizationSeconds": 60 if LONG_FORM else 10, "maxStep": 2},
}
# Streams that three pods serve, beyond those while the count rises and falls, and their tokens.
STREAMS, TOKENS = (10_000, 64) if LONG_FORM else (32, 400)


def test_replicas_rise_with_the_queue_and_fall_after_it_and_nothing_is_lost(
    installation: Installation, client: Client, figures: Figures
) -> None:
    with (
        serving(
            installation, "elastic", **SMALL, autoscaling={**QUICK, "targetPerReplica": 4}
        ) as chat,
        client.load(chat.service, model=chat.name, new_per_second=2, streams=1) as light,
    ):
        light.await_more(4)
        assert len(chat.endpoints()) == 1
        began = time.monotonic()

        def note(what: str) -> None:
            figures.note("scaling", what, time.monotonic() - began)

        with client.load(
            chat.service, model=chat.name, streams=16, stream_tokens=TOKENS, pause=0.0
        ) as heavy:
            eventually(lambda: chat.status["desiredReplicas"] > 1, 30, "more pods are wanted")
            note("load above target: until more pods are wanted, s")
            eventually(lambda: len(chat.endpoints()) > 1, 60, "a new pod serves")
            note("load above target: until the first new pod serves, s")
            eventually(lambda: len(chat.endpoints()) == 3, 120, "three pods serve")
            note("load above target: until three pods serve, s")
            heavy.await_more(0, streams=STREAMS, within=3600 if LONG_FORM else 300)
        began = time.monotonic()
        eventually(lambda: len(chat.endpoints()) == 1, 180, "one pod is left")
        note("load gone: until one pod is left, s")
        light.await_more(4, streams=1)
    figures.note("scaling", "streams served", heavy.report.streams + light.report.streams)
    figures.note("scaling", "requests answered", light.report.answered)
    for load in (heavy, light):
        load.report.assert_nothing_lost()


def test_a_full_queue_answers_200_or_429_and_the_service_keeps_its_endpoints(
    installation: Installation, client: Client, figures: Figures
) -> None:
    narrow, most = {"maxBatchTokens": 64, "maxRequests": 2, "maxQueue": 4}, 3 if LONG_FORM else 2
    spec = {**SMALL, "scheduler": narrow, "autoscaling": {**QUICK, "maxReplicas": most}}
    with (
        serving(installation, "narrow", **spec) as chat,
        client.load(
            chat.service, model=chat.name, new_per_second=10, kept=20, tokens=64, pause=0.2
        ) as load,
        Looks(lambda: len(chat.endpoints())) as endpoints,
    ):
        eventually(lambda: load.look().busy > 50, 60, "the queue is full")
        with figures.timed("full queue", f"until {most} pods serve, s"):
            eventually(lambda: len(chat.endpoints()) == most, 120, "the autoscaler adds pods")
        load.await_more(50)
    figures.note("full queue", "answered with 200", load.report.answered)
    figures.note("full queue", "answered with 429", load.report.busy)
    figures.note("full queue", "failed", len(load.report.failed))
    assert len(endpoints.seen) > 20
    assert 0 not in endpoints.seen, "the Service lost all its endpoints"
    load.report.assert_nothing_lost()
