"""The source distribution gives a wheel that plans in an empty environment, without torch."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv") or "uv"
RESOURCE = """
apiVersion: serving.fairlead.dev/v1alpha1
kind: InferenceDeployment
metadata: {name: chat, namespace: default}
spec:
  model: {source: "demo:"}
  resources: {memory: 4Gi, accelerator: {count: 0}}
"""


# As a person builds it, who names no setting of the kernels.
ENVIRONMENT = {name: value for name, value in os.environ.items() if "KERNELS" not in name}


def uv(*arguments: str) -> None:
    done = subprocess.run(
        [UV, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `python -m build` does it: the wheel comes from the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    uv("build", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(out), ".")
    (built,) = out.glob("*.whl")
    assert len(list(out.glob("*.tar.gz"))) == 1
    return built


def test_the_source_distribution_holds_what_the_kernels_are_built_from(wheel: Path) -> None:
    (path,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        str(source.relative_to(ROOT))
        for source in (ROOT / "kernels" / "fairlead_kernels" / "csrc").iterdir()
    }
    assert len(sources) > 10
    assert {*sources, "kernels/hatch_build.py"} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_the_wheel_holds_the_three_packages_with_their_types_and_the_demo_model(
    wheel: Path,
) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("fairlead_operator", "fairlead_runtime", "fairlead_kernels"):
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names
    assert "fairlead_runtime/demo/model.safetensors" in names
    assert wheel.name.endswith("-py3-none-any.whl"), "nothing was compiled for it"
    assert not [name for name in names if name.startswith("test")]


def test_an_empty_environment_with_the_wheel_alone_plans_without_torch(
    wheel: Path, tmp_path: Path
) -> None:
    home = tmp_path / "venv"
    uv("venv", "--quiet", "--python", sys.executable, str(home))
    python = str(home / "bin" / "python")
    lock = ["--constraint", str(ROOT / "requirements.lock")]
    uv("pip", "install", "--quiet", "--python", python, *lock, str(wheel))
    uv("pip", "check", "--python", python)
    (tmp_path / "chat.yaml").write_text(RESOURCE)
    command = [str(home / "bin" / "fairlead"), "plan", "-f", "chat.yaml", "-o", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"] is True
    absent = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, sys.argv[1:])))"
    subprocess.run([python, "-c", absent, "torch", "kopf", "numpy"], check=True)
