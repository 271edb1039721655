"""Every file of examples/ does what it says: resources are read as the API server reads them, and
clients talk to a real server.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_runtime.commands import serve as serve_command
from fairlead_runtime.settings.engine_config import EngineConfig
from support.crd import SCHEMA
from support.serve_process import Process, serve

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
RESOURCES = sorted(path.name for path in EXAMPLES.glob("*.yaml") if path.name != "compose.yaml")


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with serve("demo:", "--num-blocks=512") as process:
        process.until_logged("serving")
        yield process


def run(server: Process, *command: str) -> str:
    environ = {"OPENAI_BASE_URL": server.ports["public"] + "/v1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_file_is_in_the_index_with_its_command() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.name != "README.md":
            assert f"[`{path.name}{'/' if path.is_dir() else ''}`]" in page


@pytest.mark.parametrize("name", RESOURCES)
def test_a_resource_is_one_that_the_api_server_takes(name: str) -> None:
    body: Any = yaml.safe_load((EXAMPLES / name).read_text())
    jsonschema.validate(body, SCHEMA)
    deployment = InferenceDeployment.from_body(body)
    assert not deployment.unknown


def test_the_compose_file_starts_the_image_of_this_version_with_flags_that_exist() -> None:
    body: Any = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    service = body["services"]["fairlead"]
    chart: Any = yaml.safe_load((ROOT / "charts/fairlead/Chart.yaml").read_text())
    assert service["image"] == f"docker.io/fairlead/runtime:{chart['appVersion']}"
    command, *arguments = service["command"]
    assert command == "serve"
    options = serve_command._parser().parse_args(arguments)
    assert EngineConfig.from_namespace(options).drain_grace == 0
    inside = {port.rpartition(":")[2] for port in service["ports"]}
    assert inside == {str(options.port), str(options.admin_port)}


def test_the_python_client_writes_the_answer(server: Process) -> None:
    text = run(server, sys.executable, str(EXAMPLES / "openai_client.py"), "What is Fairlead?")
    assert text.startswith("Fairlead serves language models on Kubernetes.")


def test_a_tool_is_called_and_its_answer_goes_back(server: Process) -> None:
    first, *rest = run(server, sys.executable, str(EXAMPLES / "tools.py")).splitlines()
    assert first.startswith("the model calls weather({'city': '")
    assert "".join(rest).strip()


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_the_javascript_client_writes_the_answer(server: Process) -> None:
    node = shutil.which("node") or ""
    text = run(server, node, str(EXAMPLES / "client.mjs"), "What is Fairlead?")
    assert text.startswith("Fairlead serves language models on Kubernetes.")
