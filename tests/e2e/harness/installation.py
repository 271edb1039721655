"""The chart installed on the node, as a user installs it, and what a user types afterwards."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.harness import binaries
from cluster.harness.apiclient import Api
from cluster.harness.charts import CHART, Helm, only

NAMESPACE = RELEASE = "fairlead"
OPERATOR = "app.kubernetes.io/component=operator"  # the label of its pods
# A value of the chart: resources may name any tag of the runtime's image.
ANY_RUNTIME = ("--set", r"allow.images={docker\.io/fairlead/runtime:.*}")


@dataclass(frozen=True, slots=True)
class Installation:
    """The release ``fairlead`` in the namespace ``fairlead``."""

    api: Api
    helm: Helm

    def install(self, *arguments: str) -> None:
        """As in docs/install.md; returns when the operator is ready."""
        where = ("--namespace", NAMESPACE, "--wait", "--timeout=120s")
        self.helm.run("install", RELEASE, str(CHART), *where, *arguments)

    def upgrade(self, *arguments: str) -> None:
        where = ("--namespace", NAMESPACE, "--wait", "--timeout=120s")
        self.helm.run("upgrade", RELEASE, str(CHART), *where, *arguments)

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Its standard output; a failure shows all output."""
        done = subprocess.run(
            self._kubectl(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def kubectl_running(self, *arguments: str) -> Iterator[None]:
        """kubectl in the background while the block runs."""
        process = subprocess.Popen(
            self._kubectl(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def _kubectl(self, *arguments: str) -> list[str]:
        return [
            str(binaries.program("kubectl")),
            f"--kubeconfig={self.helm.kubeconfig}",
            f"--namespace={NAMESPACE}",
            *arguments,
        ]

    def image(self, kind: str) -> str:
        """The name that the chart writes for the image "operator", "runtime" or "accelerator"."""
        deployment = only(self.helm.render(), "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        if kind == "operator":
            return str(container["image"])
        environ = {entry["name"]: entry.get("value") for entry in container["env"]}
        return str(environ[f"FAIRLEAD_{kind.upper()}_IMAGE"])
