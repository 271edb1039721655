"""Every shipped example is accepted by its consumer, and an external autoscaler scales a resource.

The HPA controller here is the real one, without a metrics API: the test shows that it reads our
``/scale`` (count and selector), writes it within its bounds, and keeps the count without a metric.
KEDA does not run here; its object is validated against the documented schema.
"""

import json
import re
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # ships no types
import pytest
import yaml

from cluster.harness import binaries
from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import KIND, condition, status
from fairlead_operator.decide.children.podtemplate import pod_template
from fairlead_operator.resource.kinds import ADMIN_PORT, GROUP, NAME_LABEL
from fairlead_operator.resource.settings import Settings
from fairlead_runtime.settings import metric_names
from support.operator_bodies import resource

pytestmark = [pytest.mark.cluster("kubectl"), pytest.mark.usefixtures("crd")]
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "external-autoscaling"
SCHEMA = json.loads(Path(__file__).with_name("keda_scaledobject.schema.json").read_text())
FENCE = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = ("install.md", "resource.md", "autoscaling.md")
DEMAND = {metric_names.RUNNING, metric_names.WAITING}


def example(name: str, namespace: str = "") -> Object:
    """A shipped file, in ``namespace`` if one is given."""
    body: Object = yaml.safe_load((EXAMPLES / name).read_text())
    if namespace:
        body["metadata"]["namespace"] = namespace
    return body


def documented() -> list[Any]:
    """Each fenced YAML block of the pages."""
    return [
        pytest.param(body, id=f"{page}-{number}")
        for page in PAGES
        for number, block in enumerate(FENCE.findall((ROOT / "docs" / page).read_text()))
        for body in yaml.safe_load_all(block)
    ]


def series(query: str) -> set[str]:
    return set(re.findall(r"\b\w+:\w+", query))


def replicas(api: Api, namespace: str) -> int:
    return int(api.get(KIND, namespace, "chat")["spec"]["replicas"])


def test_each_page_shows_an_example() -> None:
    shown = {case.id.split("-")[0] for case in documented()}
    assert shown == set(PAGES)


@pytest.mark.parametrize("body", documented())
def test_the_api_server_takes_every_documented_example(api: Api, body: Object) -> None:
    if "kind" not in body:  # a part of a spec, shown alone
        base = example("inferencedeployment.yaml")
        body = {
            **base,
            "spec": {"model": base["spec"]["model"], "resources": base["spec"]["resources"]}
            | body["spec"],
        }
    assert body["kind"] == KIND
    body["metadata"]["namespace"] = "default"
    api.create(body, dryRun="All", fieldValidation="Strict")


def test_an_hpa_moves_the_resource_through_its_scale(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    def hpa() -> Object:
        answer: Object = api.get("HorizontalPodAutoscaler", namespace, "chat").get("status") or {}
        return answer

    def deployed(count: int) -> bool:
        answer = api.find("Deployment", namespace, "chat")
        return answer is not None and answer["spec"]["replicas"] == count

    def scale(count: int) -> None:
        program = [str(binaries.program("kubectl")), f"--kubeconfig={plane.kubeconfig()}"]
        subprocess.run(
            [*program, "scale", "idep/chat", f"--replicas={count}", "-n", namespace], check=True
        )

    with OperatorProcess(plane, (namespace,)) as operator:
        api.create(example("inferencedeployment.yaml", namespace), fieldValidation="Strict")
        eventually(lambda: deployed(1), 10, "the Deployment follows spec.replicas")
        eventually(lambda: status(api, namespace).get("selector"), 10, "the status names the pods")
        answer = api.call(
            "GET", f"/apis/{GROUP}/v1alpha1/namespaces/{namespace}/inferencedeployments/chat/scale"
        )
        assert answer["spec"]["replicas"] == 1
        assert f"{NAME_LABEL}=chat" in answer["status"]["selector"]

        api.create(example("hpa.yaml", namespace), fieldValidation="Strict")
        eventually(
            lambda: replicas(api, namespace) == 2, 20, "the HPA raises the count to its minReplicas"
        )
        eventually(lambda: deployed(2), 10, "the Deployment follows the HPA")
        seen = eventually(
            lambda: hpa() if condition(hpa(), "ScalingActive") else None,
            20,
            "the HPA asks for its metric",
        )
        assert condition(seen, "AbleToScale")["status"] == "True"
        # With an unusable selector it would be InvalidSelector, before any metric is asked for.
        assert condition(seen, "ScalingActive")["reason"] == "FailedGetPodsMetric"
        assert "custom.metrics.k8s.io" in condition(seen, "ScalingActive")["message"]

        scale(5)
        eventually(lambda: deployed(5), 10, "the Deployment follows kubectl scale")
        eventually(lambda: hpa().get("currentReplicas") == 5, 20, "the HPA reads the new count")
        assert replicas(api, namespace) == 5, "without a metric it keeps the count"

        scale(20)
        eventually(
            lambda: replicas(api, namespace) == 8, 20, "the HPA lowers the count to its maxReplicas"
        )
        eventually(lambda: deployed(8), 10, "the Deployment follows the HPA")
        assert condition(status(api, namespace), "AutoscalingActive")["reason"] == "External"
        assert not operator.tracebacks()


def test_the_adapter_rule_makes_the_metric_that_the_hpa_asks_for() -> None:
    (rule,) = example("prometheus-adapter-rule.yaml")["rules"]
    (metric,) = example("hpa.yaml")["spec"]["metrics"]
    (discovered,) = series(rule["seriesQuery"])
    assert re.fullmatch(rule["name"]["matches"].strip("^$"), discovered)
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    assert series(rule["metricsQuery"]) == DEMAND
    assert (
        rule["metricsQuery"].count("{<<.LabelMatchers>>}")
        == rule["metricsQuery"].count("by (<<.GroupBy>>)")
        == 2
    )


def test_the_scaled_object_is_what_keda_documents() -> None:
    body = example("keda-scaledobject.yaml")
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(body)
    for change in ({"ignoreNullValues": False}, {"treshold": "1"}, {"threshold": 100}):
        wrong = deepcopy(body)
        wrong["spec"]["triggers"][0]["metadata"] |= change
        assert not validator.is_valid(wrong), change


def test_the_scaled_object_asks_for_what_the_runtime_exposes_and_never_reads_silence_as_zero() -> (
    None
):
    (trigger,) = example("keda-scaledobject.yaml")["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    assert series(query) == DEMAND
    label = re.sub(r"[^a-zA-Z0-9_]", "_", NAME_LABEL)  # as Prometheus writes it
    assert query.count(f'{label}="chat"') == 2
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert trigger["metricType"] == "AverageValue", "the fallback needs it"


def test_the_pod_monitor_is_what_the_prometheus_operator_documents_and_finds_the_pods() -> None:
    body = example("podmonitor.yaml")
    schema = json.loads(Path(__file__).with_name("podmonitor.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(body)
    wrong: tuple[Object, ...] = (
        {"podTargetLabel": []},
        {"selector": {"matchLabel": {}}},
        {"podMetricsEndpoints": None},
    )
    for change in wrong:
        assert not validator.is_valid({**body, "spec": {**body["spec"], **change}}), change
    template = pod_template(resource(), Settings())
    (expression,) = body["spec"]["selector"]["matchExpressions"]
    assert expression == {"key": NAME_LABEL, "operator": "Exists"}
    assert NAME_LABEL in template["metadata"]["labels"]
    assert body["spec"]["podTargetLabels"] == [NAME_LABEL], "the label that the KEDA query asks for"
    (endpoint,) = body["spec"]["podMetricsEndpoints"]
    ports = {
        port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]
    }
    assert ports[endpoint["port"]] == ADMIN_PORT


def test_the_examples_agree_on_target_and_bounds() -> None:
    resource, hpa, keda = (
        example(name)["spec"]
        for name in ("inferencedeployment.yaml", "hpa.yaml", "keda-scaledobject.yaml")
    )
    assert "replicas" not in resource, "it would take the count back at each apply"
    assert resource["autoscaling"]["managedBy"] == "external"
    bounds = (resource["autoscaling"]["minReplicas"], resource["autoscaling"]["maxReplicas"])
    assert (
        bounds
        == (hpa["minReplicas"], hpa["maxReplicas"])
        == (keda["minReplicaCount"], keda["maxReplicaCount"])
    )
    assert bounds[0] <= keda["fallback"]["replicas"] <= bounds[1]
    assert hpa["scaleTargetRef"] == keda["scaleTargetRef"]
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    target = hpa["metrics"][0]["pods"]["target"]["averageValue"]
    assert target == keda["triggers"][0]["metadata"]["threshold"]
