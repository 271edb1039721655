"""A newcomer's path: the Kubernetes lines of the README and of docs/install.md, run as they stand,
in a folder that looks like a clone and in a cluster where nothing of Fairlead is.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from cluster.harness import binaries
from cluster.harness.apiclient import Api, ApiError, eventually
from cluster.harness.charts import CRD
from cluster.harness.resources import CHILDREN, KIND
from e2e.harness.figures import Figures
from e2e.harness.installation import NAMESPACE, RELEASE, Installation

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
OURS = (("CustomResourceDefinition", CRD), ("Namespace", NAMESPACE))  # what outlives an uninstall
COMMAND = re.compile(r"(?:helm|kubectl|curl|fairlead) ")
# What a newcomer downloads from the model's page, for `fairlead plan`.
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def commands(page: str, section: str = "") -> list[str]:
    """The commands of the page, or of a section, in their order: from its blocks, and helm's from
    its text too.
    """
    text = (ROOT / page).read_text().replace("\\\n", " ")
    text = text.partition(section)[2].partition("\n## ")[0] if section else text
    found = re.findall(r"```(\w*)\n(.*?)```|`(helm \w+ fairlead[^`\n]*)`", text, re.DOTALL)
    blocks = [inline or block for language, block, inline in found if not language]
    return [line for block in blocks for line in block.splitlines() if COMMAND.match(line)]


def resource(page: str) -> str:
    """The first resource that the page shows."""
    text = (ROOT / page).read_text()
    found = re.search(r"```yaml\n(apiVersion: serving\.fairlead.*?)```", text, re.DOTALL)
    assert found
    return found[1]


@dataclass(slots=True)
class Shell:
    """Runs lines in a folder; a line that ends with & goes on until the block ends."""

    folder: Path
    environ: dict[str, str]
    running: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def run(self, line: str) -> str:
        """What it prints. A failure shows all output."""
        print(f"[e2e] $ {line}")
        if line.endswith("&"):
            self._start(line.removesuffix("&"))
            return ""
        command = ["sh", "-ec", line]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, f"$ {line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, line: str) -> None:
        """A forwarded port in the background; returns when it takes connections."""
        command = ["sh", "-c", f"exec {line}"]
        self.running.append(subprocess.Popen(command, cwd=self.folder, env=self.environ))
        port = re.search(r" (\d+):\d+", line)
        assert port

        def listens() -> bool:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", int(port[1])), timeout=5).close()
                return True
            return False

        eventually(listens, 30, f"$ {line} listens")


@pytest.fixture
def shell(chart: Installation, api: Api, tmp_path: Path) -> Iterator[Shell]:
    for kind, name in OURS:
        assert is_gone(api, kind, name), "these tests come first"
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("kubectl", "helm"):
        (tools / name).symlink_to(binaries.program(name))
    environ = {
        **os.environ,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "KUBECONFIG": str(chart.helm.kubeconfig),
        "HOME": str(tmp_path),
    }
    shell = Shell(tmp_path, environ)
    yield shell
    for process in shell.running:
        process.kill()
        process.wait()
    remove_everything(chart, api)


def remove_everything(chart: Installation, api: Api) -> None:
    """Resources first, so that nobody makes what they own again. That is deleted here: the garbage
    collector learns of a new kind only within 30 s. No pod need drain.
    """
    namespaces = ("default", NAMESPACE)
    if api.find("CustomResourceDefinition", "", CRD):
        for namespace in namespaces:
            for body in api.items(KIND, namespace):
                api.delete(KIND, namespace, body["metadata"]["name"])
    label = "app.kubernetes.io/managed-by=fairlead"
    for kind in (*CHILDREN, "ReplicaSet", "Pod"):
        for meta in (body["metadata"] for body in api.items(kind, labelSelector=label)):
            with contextlib.suppress(ApiError):  # it is gone by now
                api.delete(kind, meta["namespace"], meta["name"], gracePeriodSeconds="1")
    eventually(lambda: not api.items("Pod", labelSelector=label), 120, "no pod serves")
    for namespace in namespaces:
        chart.helm.ask("uninstall", RELEASE, f"--namespace={namespace}", "--wait")
    for kind, name in OURS:
        if api.find(kind, "", name):
            api.delete(kind, "", name)
            eventually(partial(is_gone, api, kind, name), 120, f"{name} is gone")


def is_gone(api: Api, kind: str, name: str) -> bool:
    return api.find(kind, "", name) is None


def test_the_lines_of_the_readme_work_in_their_order(shell: Shell) -> None:
    (shell.folder / "chat.yaml").write_text(resource("README.md"))
    (shell.folder / "config.json").write_text(json.dumps(CONFIG))
    lines = commands("README.md", "## One deployment\n")
    told = {line.partition("  #")[0].strip(): shell.run(line) for line in lines}
    assert len(told) == 4, told
    assert "FITS" in told["fairlead plan -f chat.yaml --config config.json"]

    def shown() -> bool:
        return "InsufficientAccelerator" in shell.run(lines[-1])

    eventually(shown, 30, "it says what it waits for: this node has no GPU", every=1)


@pytest.mark.usefixtures("runtime_image")
def test_the_lines_of_docs_install_md_work_in_their_order(
    shell: Shell, api: Api, figures: Figures
) -> None:
    (shell.folder / "demo.yaml").write_text(resource("docs/install.md"))
    lines = commands("docs/install.md")
    elsewhere = [line for line in lines if "registry.example" in line]
    assert len(elsewhere) == 1
    shell.run(f"{elsewhere[0]} --dry-run=server")  # there is no such registry to pull from
    with figures.timed("newcomer", "the lines of docs/install.md, s"):
        told = {line: shell.run(line) for line in lines if line not in elsewhere}
    (answer,) = [text for line, text in told.items() if line.startswith("curl")]
    assert '"choices"' in answer
    assert any(line.startswith("helm test") for line in told)
    (demo,) = api.items(KIND, NAMESPACE)
    assert demo["metadata"]["name"] == "demo", "documented: the resources stay after an uninstall"
