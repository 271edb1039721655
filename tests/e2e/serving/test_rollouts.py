"""Changes while clients send: nothing is lost, and what does not start takes no traffic."""

import signal
import time

import pytest

from cluster.harness.apiclient import eventually
from e2e.harness.figures import Figures
from e2e.harness.installation import NAMESPACE
from e2e.harness.load import Client, Report
from e2e.harness.node import Node
from e2e.harness.served import SMALL, Served
from support.full import LONG_FORM

pytestmark = pytest.mark.e2e
LATE = 2.5  # seconds by which kube-proxy learns too late that a pod ends
# Two cores serve the two pods, the clients and the control plane.
TRAFFIC = {
    "new_per_second": 20 if LONG_FORM else 5,
    "kept": 2,
    "streams": 2,
    "tokens": 4,
    "stream_tokens": 400 if LONG_FORM else 300,
}


def test_a_larger_batch_replaces_every_pod_and_loses_no_request(
    chat: Served, client: Client, figures: Figures
) -> None:
    before = chat.names()
    with client.load(chat.service, model=chat.name, **TRAFFIC) as load:
        load.await_more(40, streams=2)
        with figures.timed("rollout", "two pods replaced under load, s"):
            chat.apply(scheduler={**SMALL["scheduler"], "maxBatchTokens": 512})
            chat.until_rolled_out()
        load.await_more(40, streams=2)
    assert not chat.names() & before
    note(figures, "two pods replaced", load.report)
    load.report.assert_nothing_lost()


def test_a_pod_is_deleted_while_kube_proxy_is_late_and_no_request_is_lost(
    chat: Served, client: Client, node: Node, figures: Figures
) -> None:
    kube_proxy = node.plane.part("kube-proxy").process
    victim = min(chat.names())
    with client.load(chat.service, model=chat.name, **TRAFFIC) as load:
        load.await_more(40, streams=2)
        kube_proxy.send_signal(signal.SIGSTOP)
        try:
            chat.installation.api.delete("Pod", NAMESPACE, victim)
            time.sleep(LATE)  # the lateness is the condition under test, not a wait for an event
        finally:
            kube_proxy.send_signal(signal.SIGCONT)
        eventually(lambda: victim not in chat.names(), 60, "the deleted pod is gone")
        chat.until_rolled_out()
        load.await_more(40, streams=2)
    note(figures, f"a pod deleted, kube-proxy {LATE} s late", load.report)
    load.report.assert_nothing_lost()


def test_a_bad_image_takes_no_traffic_and_says_why_until_it_is_taken_back(
    chat: Served, client: Client, figures: Figures
) -> None:
    serving_pods, image = chat.endpoints(), "docker.io/fairlead/runtime:no-such-version"
    assert len(serving_pods) == 2
    with client.load(chat.service, model=chat.name, **TRAFFIC) as load:
        with figures.timed("blockers", "image missing, s"):
            chat.apply(engine={"image": image})
            blocker = chat.until_blocked_by("ImagePullBackOff", 60)
        assert image in blocker["message"]
        assert blocker["hint"]
        load.await_more(40, streams=2)
        assert chat.endpoints() == serving_pods, "the pods of the last revision serve on"

        with figures.timed("rollout", "whole again after a bad image is taken back, s"):
            chat.apply(engine={})
            chat.until_rolled_out()
        load.await_more(40, streams=2)
    assert chat.endpoints() == serving_pods
    note(figures, "bad image", load.report)
    load.report.assert_nothing_lost()


def note(figures: Figures, what: str, report: Report) -> None:
    figures.note("rollout", f"{what}: requests answered", report.answered)
    figures.note("rollout", f"{what}: streams served whole", report.streams)
    figures.note("rollout", f"{what}: failed", len(report.failed))
    figures.note("rollout", f"{what}: cut", len(report.cut))
