"""External autoscalers on the pods' own metrics: a real Prometheus scrapes the pods, the real HPA
controller reads it through an adapter, and KEDA's query gets the answer that KEDA would see.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.harness.apiclient import Api, Object, eventually
from e2e.harness.adapter import Adapter, serving_metrics
from e2e.harness.figures import Figures
from e2e.harness.installation import NAMESPACE, Installation
from e2e.harness.load import Client
from e2e.harness.node import Node
from e2e.harness.prometheus import Prometheus
from e2e.harness.served import SMALL, Served
from support.full import LONG_FORM

pytestmark = pytest.mark.e2e
EXAMPLES = Path(__file__).parents[2] / "examples" / "external-autoscaling"
STREAMS = 12
MOST = 3 if LONG_FORM else 2  # pods
BUSY: Object = {"streams": STREAMS, "stream_tokens": 400, "pause": 0.0}


def example(name: str) -> Object:
    body: Object = yaml.safe_load((EXAMPLES / name).read_text())
    return body


@pytest.fixture(scope="module")
def prometheus(node: Node) -> Iterator[Prometheus]:
    with node.plane.api() as api:  # its own: a thread uses it
        started = Prometheus(node.plane, api)
        started.start()
        yield started
        started.stop()


@pytest.fixture(scope="module")
def chat(installation: Installation) -> Iterator[Served]:
    """The example's resource, with small pods: an external autoscaler sets its count."""
    installation.upgrade()
    spec = example("inferencedeployment.yaml")["spec"]
    served = Served(installation, "chat")
    try:
        served.apply(**{**spec, **SMALL, "autoscaling": {"managedBy": "external"}})
        served.until_rolled_out()
        yield served
    finally:
        served.delete(drained=False)


def test_the_query_of_the_keda_example_gives_the_requests_that_the_pods_have(
    chat: Served, client: Client, prometheus: Prometheus
) -> None:
    query = example("keda-scaledobject.yaml")["spec"]["triggers"][0]["metadata"]["query"]
    assert 'namespace="default"' in query
    query = query.replace('namespace="default"', f'namespace="{NAMESPACE}"')
    eventually(lambda: prometheus.value(query) == 0, 60, "the pod is scraped and idle")
    with client.load(chat.service, model=chat.name, **BUSY) as load:
        eventually(lambda: prometheus.value(query) == STREAMS, 60, "it counts every open stream")
    eventually(lambda: prometheus.value(query) == 0, 60, "nothing is left when the load ends")
    load.report.assert_nothing_lost()


def test_an_hpa_scales_on_the_metric_of_the_example_and_nothing_is_lost(
    chat: Served,
    client: Client,
    api: Api,
    prometheus: Prometheus,
    figures: Figures,
    tmp_path: Path,
) -> None:
    adapter = Adapter(example("prometheus-adapter-rule.yaml")["rules"][0], api, prometheus)
    hpa = example("hpa.yaml")
    assert hpa["spec"]["metrics"][0]["pods"]["metric"]["name"] == adapter.metric
    hpa["metadata"]["namespace"] = NAMESPACE
    hpa["spec"] |= {"minReplicas": 1, "maxReplicas": MOST}
    hpa["spec"]["metrics"][0]["pods"]["target"]["averageValue"] = "4"
    hpa["spec"]["behavior"]["scaleDown"] = {"stabilizationWindowSeconds": 5}
    with serving_metrics(adapter, tmp_path):
        api.create(hpa)
        try:
            with (
                client.load(chat.service, model=chat.name, **BUSY) as load,
                figures.timed("HPA", f"load above target until {MOST} pods serve, s"),
            ):
                until(chat, api, pods=MOST)
            with figures.timed("HPA", "load gone until one pod is left, s"):
                until(chat, api, pods=1)
        finally:
            api.delete(hpa["kind"], NAMESPACE, hpa["metadata"]["name"])
    load.report.assert_nothing_lost()


def until(chat: Served, api: Api, *, pods: int) -> None:
    """Returns when so many pods serve; a failure shows what the HPA says."""
    try:
        eventually(lambda: len(chat.endpoints()) == pods, 300, f"{pods} pods serve")
    except AssertionError as error:
        said = api.get("HorizontalPodAutoscaler", NAMESPACE, chat.name).get("status")
        raise AssertionError(f"{error}; the HPA says {said}") from None
