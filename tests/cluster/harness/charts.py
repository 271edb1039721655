"""The chart as helm renders and installs it, and the operator as a release runs it.

Helm reads and writes only below the folder it is given. The operator runs as a process, not in a
container: its arguments, environment and rights are the release's, its token comes from the API
server, its address from a kubeconfig.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.harness import binaries
from cluster.harness.apiclient import Api, Object, eventually, path_of
from cluster.harness.controlplane import ControlPlane
from cluster.harness.operators import OperatorProcess

CHART = Path(__file__).parents[3] / "charts" / "fairlead"
CRD = "inferencedeployments.serving.fairlead.dev"
NO_HUB = ("--set", "hub.endpoint=http://127.0.0.1:9")


@dataclass(frozen=True, slots=True)
class Helm:
    """One helm: ``program`` is "helm" (4) or "helm3"; ``kubeconfig`` only where it talks to a
    cluster.
    """

    home: Path
    program: str = "helm"
    kubeconfig: Path | None = None

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.home)}
        if self.kubeconfig:
            environ["KUBECONFIG"] = str(self.kubeconfig)
        command = [str(binaries.program(self.program)), *arguments]
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=120
        )

    def run(self, *arguments: str) -> str:
        """Its standard output; a failure shows all output."""
        done = self.ask(*arguments)
        assert done.returncode == 0, f"helm {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def render(
        self, *arguments: str, release: str = "rel", namespace: str = "home"
    ) -> list[Object]:
        """Every object of the release, test hooks too."""
        text = self.run("template", release, str(CHART), f"--namespace={namespace}", *arguments)
        return [body for body in yaml.safe_load_all(text) if body]

    def notes(self, *arguments: str, release: str = "rel", namespace: str = "home") -> str:
        """What an install of the release would print for its user."""
        where = (f"--namespace={namespace}", "--dry-run=client")
        text = self.run("install", release, str(CHART), *where, *arguments)
        return text.split("\nNOTES:\n")[1]


def only(bodies: list[Object], kind: str) -> Object:
    """The one object of this kind."""
    (body,) = [body for body in bodies if body["kind"] == kind]
    return body


def of_kind(bodies: list[Object], kind: str) -> list[Object]:
    return [body for body in bodies if body["kind"] == kind]


def environment(container: Mapping[str, Any], pod: Mapping[str, Any]) -> dict[str, str]:
    """The environment that a kubelet would give this container of this pod."""
    meta = pod["metadata"]
    fields = {"metadata.name": meta["name"], "metadata.namespace": meta["namespace"]}
    environ = {}
    for entry in container["env"]:
        source = entry.get("valueFrom")  # an empty value is not stored
        environ[entry["name"]] = (
            fields[source["fieldRef"]["fieldPath"]] if source else entry.get("value", "")
        )
    return environ


def token_of(api: Api, namespace: str, account: str) -> str:
    """A token of a ServiceAccount, requested like a kubelet does (TokenRequest)."""
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600},
    }
    answer = api.call("POST", path_of("ServiceAccount", namespace, account, "token"), body)
    return str(answer["status"]["token"])


def pod_of(api: Api, namespace: str, deployment: Object) -> Object:
    """A pod of this Deployment: it exists, so Pod Security admitted it."""
    labels = ",".join(f"{k}={v}" for k, v in deployment["spec"]["selector"]["matchLabels"].items())
    pods = eventually(
        lambda: api.items("Pod", namespace, labelSelector=labels), 20, "a pod of the operator"
    )
    return pods[0]


def operator_of(plane: ControlPlane, api: Api, namespace: str, name: str) -> OperatorProcess:
    """The operator with the arguments, environment and rights of the live Deployment, not started
    yet.
    """
    deployment = api.get("Deployment", namespace, name)
    pod = pod_of(api, namespace, deployment)
    container = pod["spec"]["containers"][0]
    assert container["command"] == ["python", "-m", "fairlead_operator"]
    return OperatorProcess(
        plane,
        (),
        identity=pod["metadata"]["name"],
        token=token_of(api, namespace, pod["spec"]["serviceAccountName"]),
        environ=environment(container, pod),
        arguments=tuple(
            container["args"]
        ),  # --probe-port follows once more, and the last one counts
    )


def refusals(operator: OperatorProcess) -> list[str]:
    """What the API server forbade this operator: its own calls by their count, kopf's watches by
    its log.
    """
    count = operator.metric("fairlead_operator_api_calls_total", code="403")
    lines = operator.log.read_text(errors="replace").splitlines()
    return [f"{count:.0f} calls"] * bool(count) + [line for line in lines if "orbidden" in line]
