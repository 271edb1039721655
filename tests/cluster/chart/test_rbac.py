"""The chart's Role is exact: with it, no request is forbidden; without any one verb, some request
is.

A short run takes a part of the verbs, chosen by FAIRLEAD_CASE_OFFSET; FAIRLEAD_FULL=1 takes all of
them.
"""

import copy
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.harness import binaries
from cluster.harness.apiclient import Api, Object, eventually
from cluster.harness.case_selection import share
from cluster.harness.controlplane import ControlPlane
from cluster.harness.operators import OperatorProcess
from cluster.harness.resources import CHILDREN, KIND, idep, status

pytestmark = [pytest.mark.cluster("helm"), pytest.mark.usefixtures("crd", "nodes")]
CHART = Path(__file__).parents[3] / "charts" / "fairlead"
EVERYTHING = {"FAIRLEAD_ALLOWED_MODEL_CACHE_CREATE": "true"}


def rendered(namespace: str) -> list[Object]:
    """The chart's RBAC objects for this namespace, with claims allowed."""
    command = [str(binaries.program("helm")), "template", "r", str(CHART), "-n", namespace]
    done = subprocess.run(
        [*command, "--set", "modelCache.create=true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kinds = {"ServiceAccount", "Role", "RoleBinding"}
    bodies = [body for body in yaml.safe_load_all(done.stdout) if body and body["kind"] in kinds]
    for body in bodies:
        body["metadata"].setdefault("namespace", namespace)
    return bodies


def verbs(bodies: list[Object]) -> list[tuple[str, str]]:
    """Every (resource, verb) that is granted."""
    return [
        (resource, verb)
        for body in bodies
        if body["kind"] == "Role"
        for rule in body["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def without(bodies: list[Object], resource: str, verb: str) -> list[Object]:
    """The same rights without one verb on one resource."""
    out = copy.deepcopy(bodies)
    for body in out:
        if body["kind"] != "Role":
            continue
        rules: list[Object] = []
        for rule in body["rules"]:
            others = [one for one in rule["resources"] if one != resource]
            if others:
                rules.append({**rule, "resources": others})
            left = [one for one in rule["verbs"] if one != verb]
            if resource in rule["resources"] and left:
                rules.append({**rule, "resources": [resource], "verbs": left})
        body["rules"] = rules
    return out


def install(plane: ControlPlane, api: Api, bodies: list[Object]) -> str:
    """Create the rights; returns a token of their ServiceAccount."""
    for body in bodies:
        api.apply(body, force="true")
    meta = next(b["metadata"] for b in bodies if b["kind"] == "ServiceAccount")
    path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{meta['name']}/token"
    spec = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600},
    }
    token: str = api.call("POST", path, spec)["status"]["token"]
    return token


def exercise(api: Api, namespace: str) -> Iterator[Any]:
    """Everything that the operator must be able to do, step by step; yields what to wait for."""
    foreign: dict[str, Object] = {
        "Deployment": {
            "selector": {"matchLabels": {"a": "b"}},
            "template": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {"containers": [{"name": "c", "image": "none"}]},
            },
            "replicas": 0,
        },
        "Service": {"ports": [{"port": 80}]},
        "PodDisruptionBudget": {"maxUnavailable": 1, "selector": {"matchLabels": {"a": "b"}}},
        "NetworkPolicy": {"podSelector": {}, "policyTypes": []},
        "PersistentVolumeClaim": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    versions = {
        "Deployment": "apps/v1",
        "PodDisruptionBudget": "policy/v1",
        "NetworkPolicy": "networking.k8s.io/v1",
    }
    for kind, spec in foreign.items():
        name = "taken-model-cache" if kind == "PersistentVolumeClaim" else "taken"
        meta = {"name": name, "namespace": namespace}
        api.create(
            {"apiVersion": versions.get(kind, "v1"), "kind": kind, "metadata": meta, "spec": spec}
        )
    cache = {"type": "PVC", "size": "1Gi", "accessModes": ["ReadWriteMany"]}
    hub: Object = {"model": {"source": "owner/name"}, "modelCache": cache}
    api.create(idep(namespace, "taken", replicas=2, **hub))
    yield (
        lambda: (
            sum(
                b["code"] == "Conflict"
                for b in status(api, namespace, "taken").get("blockers") or ()
            )
            == 5
        )
    )
    api.create(idep(namespace, replicas=2, **hub))
    yield lambda: all(api.find(kind, namespace, "chat") for kind in CHILDREN)
    yield lambda: api.find("PersistentVolumeClaim", namespace, "chat-model-cache")
    yield lambda: status(api, namespace).get("replicas") == 2
    api.merge("Service", namespace, "chat", {"spec": {"selector": {"drift": "x"}}})
    yield lambda: "drift" not in api.get("Service", namespace, "chat")["spec"]["selector"]
    api.merge(
        KIND, namespace, "chat", {"spec": {"replicas": 1, "security": {"networkPolicy": False}}}
    )
    yield lambda: not api.find("PodDisruptionBudget", namespace, "chat")
    yield lambda: not api.find("NetworkPolicy", namespace, "chat")
    yield lambda: any(e["involvedObject"]["kind"] == KIND for e in api.items("Event", namespace))


def refusals(operator: OperatorProcess) -> list[str]:
    return [line for line in operator.log.read_text().splitlines() if "orbidden" in line]


def test_with_the_charts_role_nothing_the_operator_does_is_forbidden(
    plane: ControlPlane, api: Api, namespace: str
) -> None:
    token = install(plane, api, rendered(namespace))
    with OperatorProcess(plane, (namespace,), token=token, environ=EVERYTHING) as operator:
        for number, wanted in enumerate(exercise(api, namespace)):
            eventually(wanted, 20, f"step {number}; {operator.tail(1500)}")
        assert refusals(operator) == []
        assert not operator.tracebacks()


def parts() -> list[int]:
    """Which of the granted verbs this run takes away."""
    return share(range(len(verbs(rendered("any")))), 12)


@pytest.mark.timeout(2400)
def test_without_any_one_verb_something_is_forbidden(plane: ControlPlane, api: Api) -> None:
    for number in parts():
        namespace = f"rbac-{number}"
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        whole = rendered(namespace)
        resource, verb = verbs(whole)[number]
        token = install(plane, api, without(whole, resource, verb))
        with OperatorProcess(
            plane, (namespace,), token=token, environ=EVERYTHING, wait=False
        ) as operator:
            deadline = time.monotonic() + 60
            for wanted in exercise(api, namespace):
                while not refusals(operator) and not wanted() and time.monotonic() < deadline:
                    time.sleep(0.1)
                if refusals(operator) or time.monotonic() > deadline:
                    break
            eventually(lambda o=operator: refusals(o), 10, f"{verb} on {resource} is not needed")  # type: ignore[misc]
        api.delete("Namespace", "", namespace)


def test_the_role_grants_no_secret_no_pod_creation_and_no_wildcard() -> None:
    granted = verbs(rendered("any"))
    assert not {r for r, _ in granted} & {
        "secrets",
        "configmaps",
        "serviceaccounts",
        "roles",
        "nodes",
        "*",
    }
    assert {v for _, v in granted} <= {
        "get",
        "list",
        "watch",
        "create",
        "patch",
        "update",
        "delete",
    }
    assert {v for r, v in granted if r == "pods"} == {"list", "watch"}
    assert {v for r, v in granted if r == "inferencedeployments/status"} == {"patch"}
