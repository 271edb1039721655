"""The chart on its own cluster: installed, serving, upgraded, rolled back, tested and removed.

Release namespaces enforce Pod Security "restricted"; kwok plays the nodes of the operator's pods,
so that helm can wait for them, and the operator runs as a process with the rights, arguments and
environment of the live Deployment.
"""

import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.harness import binaries
from cluster.harness.apiclient import Api, ApiError, Object, eventually
from cluster.harness.charts import (
    CHART,
    CRD,
    NO_HUB,
    Helm,
    environment,
    of_kind,
    only,
    operator_of,
    pod_of,
    refusals,
    token_of,
)
from cluster.harness.controlplane import ControlPlane
from cluster.harness.fakekubelet import FakeKubelet
from cluster.harness.nodes import add_nodes, start_kwok
from cluster.harness.resources import KIND, PROCESSES, condition, current, idep, status
from fairlead_operator.commands.operator_flags import read
from fairlead_operator.resource.settings import Settings

pytestmark = pytest.mark.cluster("helm", "helm3", "kubectl")
ROOT = CHART.parents[1]
START = 90  # seconds that a runtime process may take on a busy machine
WAIT = ("--wait", "--timeout=60s")
KINDS = ("Deployment", "ServiceAccount", "Role", "RoleBinding")


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """An empty cluster: only the chart installs the CRD."""
    with ControlPlane() as started:
        start_kwok(started)
        yield started


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> Iterator[Api]:
    with plane.api() as client:
        add_nodes(client, 1)
        yield client


@pytest.fixture
def no_crd(api: Api) -> None:
    """The cluster has no CRD, as before the first install."""
    if api.find("CustomResourceDefinition", "", CRD):
        api.delete("CustomResourceDefinition", "", CRD)
        eventually(lambda: not api.find("CustomResourceDefinition", "", CRD), 20, "no definition")


def helm_of(plane: ControlPlane, home: Path, program: str = "helm") -> Helm:
    return Helm(home, program, plane.kubeconfig())


def settings(api: Api, namespace: str) -> Settings:
    """The settings that the operator reads from its live Deployment."""
    spec = api.get("Deployment", namespace, "fairlead")["spec"]["template"]["spec"]["containers"][0]
    return read(
        spec["args"], environment(spec, {"metadata": {"name": "p", "namespace": namespace}}), "host"
    )


def runtimes(api: Api, namespace: str) -> list[str]:
    """The images that the operator gives to pods without and with accelerators."""
    return [settings(api, namespace).image_for(count) for count in (0, 1)]


def image_of(api: Api, namespace: str, name: str) -> str:
    """The image of a resource's pods."""
    (container,) = api.get("Deployment", namespace, name)["spec"]["template"]["spec"]["containers"]
    return str(container["image"])


def converged(api: Api, namespace: str, *, claim: bool = False) -> Object:
    """Create a resource; its Deployment, once all children exist and the status is current."""
    cache = {"type": "PVC", "size": "1Gi", "accessModes": ["ReadWriteMany"]}
    cached = {"model": {"source": "owner/name"}, "modelCache": cache}
    spec: dict[str, Any] = cached if claim else {}
    api.create(idep(namespace, replicas=2, **spec))
    children = ["Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"]
    for kind in children:
        eventually(
            lambda kind=kind: api.find(kind, namespace, "chat"),  # type: ignore[misc]
            20,
            f"the {kind} of the resource",
        )
    if claim:
        eventually(
            lambda: api.items("PersistentVolumeClaim", namespace), 20, "the claim of the resource"
        )
    eventually(lambda: current(api, namespace), 20, "the status is current")
    return api.get("Deployment", namespace, "chat")


@pytest.fixture
def second_namespace(api: Api, namespace: str) -> Iterator[str]:
    """A second restricted namespace."""
    name = f"{namespace[:50]}-further"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.create(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )
    yield name
    api.delete("Namespace", "", name)


@pytest.mark.parametrize("program", ["helm", "helm3"])
@pytest.mark.usefixtures("no_crd")
def test_a_release_installs_upgrades_and_rolls_back_and_its_uninstall_keeps_resources(
    plane: ControlPlane,
    api: Api,
    namespace: str,
    second_namespace: str,
    tmp_path: Path,
    program: str,
) -> None:
    helm = helm_of(plane, tmp_path, program)
    here = f"--namespace={namespace}"
    helm.run(
        "install",
        "fairlead",
        str(CHART),
        here,
        *NO_HUB,
        *WAIT,
        "--set",
        f"scope.namespaces={{{second_namespace}}}",
    )
    installed = api.get("CustomResourceDefinition", "", CRD)["spec"]["versions"][0]["schema"]
    with operator_of(plane, api, namespace, "fairlead") as operator:
        converged(api, namespace)
        before = converged(api, second_namespace)
        api.create(idep(namespace, "gpu", resources={"accelerator": {"count": 1}}))
        eventually(lambda: api.find("Deployment", namespace, "gpu"), 20, "pods with accelerators")
        images = [image_of(api, namespace, name) for name in ("chat", "gpu")]
        assert refusals(operator) == []
        assert operator.tracebacks() == []

    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    by_default = [f"docker.io/fairlead/runtime:{tag}" for tag in (version, f"{version}-cuda")]
    assert images == by_default
    changed = ("replicas=2", "allow.priorityClasses={critical}", "runtime.image.tag=one")
    changes = [f"--set={value}" for value in changed]
    helm.run("upgrade", "fairlead", str(CHART), here, "--reuse-values", *changes, *WAIT)
    assert api.get("Deployment", namespace, "fairlead")["status"]["readyReplicas"] == 2
    assert settings(api, namespace).allowed_priority_classes == ("critical",)
    assert runtimes(api, namespace) == ["docker.io/fairlead/runtime:one"] * 2
    helm.run("rollback", "fairlead", "1", here, *WAIT)
    assert api.get("Deployment", namespace, "fairlead")["spec"]["replicas"] == 1
    assert settings(api, namespace).allowed_priority_classes == ()
    assert runtimes(api, namespace) == by_default
    assert settings(api, namespace).namespaces == (namespace, second_namespace)

    api.delete(KIND, namespace, "gpu")
    helm.run("uninstall", "fairlead", here, *WAIT)
    for kind in KINDS:
        assert not api.find(kind, namespace, "fairlead"), kind
    assert not api.find("Role", second_namespace, "fairlead")
    assert (
        api.get("CustomResourceDefinition", "", CRD)["spec"]["versions"][0]["schema"] == installed
    )
    for place in (namespace, second_namespace):
        assert current(api, place)
    after = api.get("Deployment", second_namespace, "chat")
    assert (after["metadata"]["uid"], after["spec"]) == (before["metadata"]["uid"], before["spec"])
    for place in (namespace, second_namespace):
        api.delete(
            KIND, place, "chat"
        )  # else a later operator would serve it in a namespace that is being deleted
        assert not api.find(KIND, place, "chat"), "deleting needs no operator"


def test_cluster_mode_serves_every_namespace_and_creates_claims(
    plane: ControlPlane, api: Api, namespace: str, second_namespace: str, tmp_path: Path
) -> None:
    helm = helm_of(plane, tmp_path)
    values = ("--set", "scope.cluster=true", "--set", "modelCache.create=true")
    helm.run("install", "fairlead", str(CHART), f"--namespace={namespace}", *NO_HUB, *WAIT, *values)
    try:
        with operator_of(plane, api, namespace, "fairlead") as operator:
            converged(api, second_namespace, claim=True)
            assert refusals(operator) == []
            assert operator.tracebacks() == []
        with (
            plane.api(token_of(api, namespace, "fairlead")) as operator_api,
            pytest.raises(ApiError) as refused,
        ):
            operator_api.items("Secret", second_namespace)
        assert refused.value.code == 403
    finally:
        helm.run("uninstall", "fairlead", f"--namespace={namespace}", *WAIT)
    assert not api.find("ClusterRole", "", "fairlead")
    assert not api.find("ClusterRoleBinding", "", "fairlead")


@pytest.mark.usefixtures("pod_addresses")
def test_a_release_serves_a_token_and_helm_runs_its_test(
    plane: ControlPlane, api: Api, namespace: str, tmp_path: Path
) -> None:
    """The test hook's client gets its token from a real runtime process; its pod is simulated."""
    helm = helm_of(plane, tmp_path)
    here = f"--namespace={namespace}"
    helm.run("install", "fairlead", str(CHART), here, *NO_HUB, *WAIT)
    client = only(helm.render(namespace=namespace, release="fairlead"), "Pod")
    with FakeKubelet(plane), operator_of(plane, api, namespace, "fairlead") as operator:
        api.create(idep(namespace, podTemplate=PROCESSES, model={"servedName": "demo"}))

        def ready() -> bool:
            return condition(status(api, namespace), "Ready").get("status") == "True"

        eventually(ready, START, "Ready")
        (pod,) = api.items("Pod", namespace, labelSelector="serving.fairlead.dev/name=chat")
        url = f"http://{pod['status']['podIP']}:8000/v1/completions"
        command = [sys.executable, *client["spec"]["containers"][0]["command"][1:], url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "one token came" in done.stdout
        assert refusals(operator) == []
        api.delete(KIND, namespace, "chat")
    name = client["metadata"]["name"]
    with PlayedPod(api, namespace, name, "Succeeded"):
        assert "Succeeded" in helm.run("test", "fairlead", here, "--timeout=60s")
    eventually(lambda: not api.find("Pod", namespace, name), 20, "the test cleans up")
    assert api.items(KIND, namespace) == []
    with PlayedPod(api, namespace, name, "Failed"):
        assert helm.ask("test", "fairlead", here, "--timeout=60s").returncode == 1
    assert api.find("Pod", namespace, name), "the failed pod remains for inspection"
    assert api.items(KIND, namespace) == [], "no resource remains"


class PlayedPod:
    """Within the block, the pod of this name ends in this phase as soon as it runs: before, the
    simulated node would write over it.
    """

    def __init__(self, api: Api, namespace: str, name: str, phase: str) -> None:
        self._where, self._api, self._phase = ("Pod", namespace, name), api, phase
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(70)

    def _run(self) -> None:
        eventually(self._runs, 60, "the pod of the test runs")
        self._api.merge(*self._where, {"status": {"phase": self._phase}}, sub="status")

    def _runs(self) -> bool:
        pod = self._api.find(*self._where) or {"status": {}}
        return bool(pod["status"].get("phase") == "Running")


@pytest.mark.usefixtures("no_crd")
def test_an_older_definition_is_upgraded_as_documented_with_its_resources_in_place(
    plane: ControlPlane, api: Api, namespace: str, tmp_path: Path
) -> None:
    """The older CRD lacks two fields and a column and describes another field differently."""
    older = tmp_path / "older"
    shutil.copytree(CHART, older)
    (file,) = (older / "crds").iterdir()
    body = yaml.safe_load(file.read_text())
    version = body["spec"]["versions"][0]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["paused"], spec["cache"]["properties"]["cpuOffloadSpace"]
    spec["replicas"]["description"] = "In other words."
    version["additionalPrinterColumns"].pop()
    file.write_text(yaml.safe_dump(body))
    helm = helm_of(plane, tmp_path)
    helm.run("install", "fairlead", str(older), f"--namespace={namespace}", *NO_HUB)
    pod_of(api, namespace, api.get("Deployment", namespace, "fairlead"))
    with pytest.raises(ApiError, match="paused"):
        api.create(idep(namespace, paused=True), fieldValidation="Strict")
    old = api.create(idep(namespace), fieldValidation="Strict")
    assert "cpuOffloadSpace" not in old["spec"]["cache"]

    (line,) = re.findall(
        r"^helm show crds charts/fairlead \| kubectl (apply --server-side .*)$",
        (ROOT / "docs" / "install.md").read_text(),
        re.MULTILINE,
    )
    kubectl = [
        str(binaries.program("kubectl")),
        f"--kubeconfig={plane.kubeconfig()}",
        *shlex.split(line),
    ]
    shown = helm.run("show", "crds", str(CHART))
    done = subprocess.run(kubectl, input=shown, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    helm.run("upgrade", "fairlead", str(CHART), f"--namespace={namespace}", *NO_HUB)

    kept = api.get(KIND, namespace, "chat")
    assert kept["metadata"]["uid"] == old["metadata"]["uid"]
    assert kept["metadata"]["generation"] == 1
    assert kept["spec"]["cache"] == {**old["spec"]["cache"], "cpuOffloadSpace": 0}, (
        "the new default is there"
    )
    shipped = yaml.safe_load((CHART / "crds" / file.name).read_text())["spec"]["versions"][0]
    live = api.get("CustomResourceDefinition", "", CRD)["spec"]["versions"][0]
    assert live["additionalPrinterColumns"] == shipped["additionalPrinterColumns"]
    assert live["schema"] == shipped["schema"]
    api.merge(KIND, namespace, "chat", {"spec": {"paused": True}})
    assert api.get(KIND, namespace, "chat")["spec"]["paused"] is True
    with operator_of(plane, api, namespace, "fairlead") as operator:
        eventually(
            lambda: current(api, namespace), 20, "the upgraded operator serves the old resource"
        )
        assert refusals(operator) == []


@pytest.mark.parametrize(
    "values",
    [(), ("--set", "scope.cluster=true,replicas=3,modelCache.create=true,admission.create=true")],
)
def test_everything_rendered_is_admitted_where_pod_security_is_restricted(
    api: Api, namespace: str, tmp_path: Path, values: tuple[str, ...]
) -> None:
    """By dry-run with strict fields. Pod Security judges Pods only, so the Deployment's template
    becomes a Pod.
    """
    (file,) = (CHART / "crds").iterdir()
    api.apply(yaml.safe_load(file.read_text()), force="true")
    eventually(lambda: _served(api, namespace), 10, "the definition is served")
    bodies = Helm(tmp_path).render(*values, namespace=namespace)
    account = only(bodies, "ServiceAccount")
    template = only(bodies, "Deployment")["spec"]["template"]
    meta = {"name": "operator", "namespace": namespace, "labels": template["metadata"]["labels"]}
    bodies.append({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]})
    api.create(account)
    for body in bodies:
        if body is not account:
            api.create(body, dryRun="All", fieldValidation="Strict")
    assert len(of_kind(bodies, "Pod")) == 2
    assert of_kind(bodies, KIND)
    privileged = {**bodies[-1], "spec": {**template["spec"], "securityContext": {}}}
    with pytest.raises(ApiError, match="violates PodSecurity"):
        api.create(privileged, dryRun="All")


def _served(api: Api, namespace: str) -> bool:
    try:
        return api.items(KIND, namespace) == []
    except ApiError:
        return False
