"""The definition of one version and the operator of another, upgraded in both orders."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import KIND, condition, current, idep, status

pytestmark = pytest.mark.cluster


@pytest.fixture
def define(api: Api, crd: Object) -> Iterator[Any]:
    """Replaces the definition for one test, and waits until the API server serves the new one."""
    name = crd["metadata"]["name"]

    def install(body: Object, probe: str, *, served: bool) -> None:
        version = api.get("CustomResourceDefinition", "", name)["metadata"]["resourceVersion"]
        meta = {"name": name, "resourceVersion": version}
        api.call(
            "PUT",
            f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}",
            {**body, "metadata": meta},
        )

        def has_probe() -> bool:
            spec = {"model": {"source": "demo:"}, probe: {}}
            one = {**idep("default", "probe"), "spec": spec}
            return (probe in api.create(one, dryRun="All")["spec"]) is served

        eventually(has_probe, 20, "the new definition is served")

    yield install
    install(crd, "tracing", served=False)


def schema(crd: Object) -> Object:
    out: Object = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return out


def with_one_more_field(crd: Object) -> Object:
    """The definition of a version to come: defaulted fields in three places."""
    newer = copy.deepcopy(crd)
    spec = schema(newer)["spec"]["properties"]
    number = {"type": "integer", "default": 7}
    spec["engine"]["properties"]["lookahead"] = number
    spec["podTemplate"]["properties"]["tolerations"]["items"]["properties"]["weight"] = number
    spec["tracing"] = {"type": "object", "default": {}, "properties": {"rate": number}}
    return newer


def settled(api: Api, namespace: str) -> bool:
    child = api.find("Deployment", namespace, "chat")
    return child is not None and current(api, namespace)


def test_an_operator_ignores_the_fields_of_a_newer_definition_and_names_them(
    plane: ControlPlane, api: Api, crd: Object, define: Any, namespace: str
) -> None:
    """The definition is upgraded first, or the operator is rolled back."""
    tolerations = [{"key": "x", "operator": "Exists"}]
    with OperatorProcess(plane, (namespace,)) as operator:
        api.create(idep(namespace, podTemplate={"tolerations": tolerations}))
        eventually(lambda: settled(api, namespace), 20, "the children exist")
        before = api.get("Deployment", namespace, "chat")["spec"]["template"]

        define(with_one_more_field(crd), "tracing", served=True)
        api.merge(KIND, namespace, "chat", {"spec": {"service": {"port": 81}}})
        eventually(lambda: settled(api, namespace), 20, "the change is acted on")
        assert api.get("Service", namespace, "chat")["spec"]["ports"][0]["port"] == 81

        operator.stop()
        operator.start()  # a watch keeps the definition that it began with; a new list does not
        said = eventually(
            lambda: condition(status(api, namespace), "SpecUnderstood"), 20, "the condition"
        )
        assert (said["status"], said["reason"]) == ("False", "UnknownFields")
        assert "InvalidSpec" not in {b["code"] for b in status(api, namespace)["blockers"]}
        assert api.get("Deployment", namespace, "chat")["spec"]["template"] == before
        for name in (".podTemplate.tolerations[0].weight", ".tracing", ".engine.lookahead"):
            assert f"spec{name}" in said["message"]
        assert not operator.tracebacks()


def test_an_operator_works_with_an_older_definition(
    plane: ControlPlane, api: Api, crd: Object, define: Any, namespace: str
) -> None:
    """The operator is upgraded first: fields of the spec and of the status are not known yet."""
    older = copy.deepcopy(crd)
    parts = schema(older)
    del parts["spec"]["properties"]["service"]
    for place in (parts["status"], parts["status"]["properties"]["rollout"]):
        place["properties"].pop("why", None)
        place["properties"].pop("drainingReplicas", None)
    define(older, "service", served=False)
    with OperatorProcess(plane, (namespace,)) as operator:
        # Of no pod there is news: once the plan is known, the status changes no more.
        api.create(idep(namespace, replicas=0))
        eventually(lambda: settled(api, namespace), 20, "the children exist and the status is new")
        eventually(
            lambda: condition(status(api, namespace), "Planned").get("status") == "True",
            20,
            "the plan is known",
        )
        seen = status(api, namespace)
        assert seen["rollout"]["strategyChosen"]
        assert "drainingReplicas" not in seen

        await_pass(api, namespace, operator)  # the last write has been counted
        writes = operator.metric("fairlead_operator_api_calls_total", verb="status")
        for _ in range(5):
            await_pass(api, namespace, operator)
        assert operator.metric("fairlead_operator_api_calls_total", verb="status") == writes
        assert not operator.tracebacks()


def await_pass(api: Api, namespace: str, operator: OperatorProcess) -> None:
    """Changes the resource, and waits until a pass has ended since."""
    passes = operator.metric("fairlead_operator_reconciles_total")
    api.merge(KIND, namespace, "chat", {"metadata": {"annotations": {"n": str(passes)}}})
    eventually(lambda: operator.metric("fairlead_operator_reconciles_total") > passes, 10, "a pass")
