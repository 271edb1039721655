"""The pages about the resource agree with the CRD and the operator's code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fairlead_operator.resource.kinds import RESOURCE
from fairlead_operator.resource.resource import InferenceDeployment

ROOT = Path(__file__).parents[2]


def test_the_field_tables_are_those_of_the_crd() -> None:
    command = [sys.executable, "scripts/make_resource_docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["resource.md", "autoscaling.md"])
def test_every_example_is_a_resource_that_is_accepted(page: str) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert examples
    for text in examples:
        body = {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.name,
            "metadata": {"name": "demo"},
        } | yaml.safe_load(text)
        body["spec"].setdefault("model", {"source": "demo:"})
        assert InferenceDeployment.from_body(body).name == "demo"


def test_every_limit_of_the_autoscaler_is_explained() -> None:
    code = (ROOT / "operator/fairlead_operator/decide/scale/autoscale.py").read_text()
    names = set(re.findall(r'\.limit\("([^"]+)"', code))
    page = (ROOT / "docs/autoscaling.md").read_text()
    assert names
    assert {name for name in names if f"`{name}`" not in page} == set()
