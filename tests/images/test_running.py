"""Containers of the images as a restricted pod runs them: any user, a read-only root."""

import json
import subprocess
from pathlib import Path

import pytest

import compile_flashinfer
from support.image_archive import Archive, container, container_name, inside

pytestmark = pytest.mark.images
ROOT = Path(__file__).parents[2]
RUNTIMES = ("runtime", "runtime_cuda")
STRANGER = 1_234_560_000  # as OpenShift gives them: no entry in /etc/passwd
RESOURCE = """
apiVersion: serving.fairlead.dev/v1alpha1
kind: InferenceDeployment
metadata: {name: chat, namespace: default}
spec:
  model: {source: "demo:"}
  resources: {memory: 4Gi, accelerator: {count: 0}}
"""
ASK = """
import json, urllib.request
body = {"model": "demo", "max_tokens": 12, "temperature": 0, "seed": 1,
        "messages": [{"role": "user", "content": "Who are you?"}]}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions",
    data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
with urllib.request.urlopen(request, timeout=300) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
# Arguments: the names that the image should have. No GPU is needed to find and load a module.
FIND_MODULES = """
import json, os, sys
os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "8.0 9.0a"  # asked of a GPU otherwise
import torch
from flashinfer import aot
from flashinfer.jit.core import MissingJITCacheError
def specification(dtype, size, window, soft_cap):
    (found,) = aot.gen_fa2(dtype, dtype, size, size, window, soft_cap, prefill_only=True)
    return found
answer = {}
for dtype, size, window, soft_cap in json.loads(sys.argv[1]):
    found = specification(getattr(torch, dtype), size, window, soft_cap)
    module = found.build_and_load()
    answer[found.name] = found.is_aot and callable(module["plan"])
try:
    specification(torch.float16, 96, False, True).build_and_load()
except MissingJITCacheError:
    answer["compiled another"] = False
print(json.dumps(answer))
"""
REFUSED = """
for path in ("/x", "/opt/fairlead/x", "/etc/passwd"):
    try:
        open(path, "a")
    except OSError:
        continue
    raise SystemExit(f"{path} was opened for writing")
"""


def finished(image: Archive, root: Path, tmp_path: Path, *command: str) -> tuple[int, str]:
    """Exit code and output of a command in a container of its own."""
    with container(image, root, tmp_path / container_name(), list(command), STRANGER) as process:
        output, _ = process.communicate()
        return process.returncode, output


def test_the_operator_image_runs_the_operator_as_any_user(
    operator: Archive, operator_root: Path, tmp_path: Path
) -> None:
    code, output = finished(
        operator, operator_root, tmp_path, "python", "-m", "fairlead_operator", "--help"
    )
    assert code == 0, output
    assert "--all-namespaces" in output


def test_the_operator_outside_a_cluster_says_what_it_lacks(
    operator: Archive, operator_root: Path, tmp_path: Path
) -> None:
    command = ("env", "FAIRLEAD_RUNTIME_IMAGE=x", "python", "-m", "fairlead_operator")
    code, output = finished(operator, operator_root, tmp_path, *command, "--namespace=x")
    assert code == 2, output
    assert "KUBECONFIG is not set" in output


def of(name: str, request: pytest.FixtureRequest) -> tuple[Archive, Path]:
    """An image and its root folder, by the name of its fixture."""
    return request.getfixturevalue(name), request.getfixturevalue(f"{name}_root")


@pytest.mark.parametrize("name", ["operator", *RUNTIMES])
def test_the_plan_is_made_in_each_image(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    image, root = of(name, request)
    script = (
        f"cat > /tmp/chat.yaml <<'EOF'\n{RESOURCE}\nEOF\nfairlead plan -f /tmp/chat.yaml -o json"
    )
    code, output = finished(image, root, tmp_path, "sh", "-c", script)
    assert code == 0, output
    assert json.loads(output)["fits"] is True


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_runtime_image_serves_the_demo_model_as_any_user_with_a_read_only_root(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    runtime, runtime_root = of(name, request)
    command = [
        "fairlead",
        "serve",
        "demo:",
        "--device=cpu",
        "--num-blocks=64",
        "--served-name=demo",
    ]
    bundle = tmp_path / container_name()
    with container(runtime, runtime_root, bundle, command, STRANGER) as process:
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if json.loads(line)["message"] == "serving":
                break
        else:
            pytest.fail("the server ended:\n" + "".join(lines))
        answer = inside(bundle.name, "python", "-c", ASK)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.strip()
        wrote = inside(bundle.name, "python", "-c", REFUSED)
        assert wrote.returncode == 0, wrote.stderr
        user = inside(bundle.name, "id", "-u")
        assert user.stdout.strip() == str(STRANGER)
        subprocess.run(["runc", "kill", bundle.name, "TERM"], check=True)
        rest, _ = process.communicate()
        assert process.returncode == 0, "".join(lines) + rest


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_runtime_image_says_that_it_finds_no_accelerator(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    runtime, runtime_root = of(name, request)
    code, output = finished(
        runtime, runtime_root, tmp_path, "fairlead", "serve", "demo:", "--device=cuda"
    )
    assert code == 2, output
    assert json.loads(output.splitlines()[-1])["code"] == "NoAccelerator"


def test_flashinfer_in_the_cuda_image_finds_each_listed_module_and_compiles_no_other(
    runtime_cuda: Archive, runtime_cuda_root: Path, tmp_path: Path
) -> None:
    _, modules = compile_flashinfer.read(ROOT / "docker/flashinfer_modules.toml")
    values = json.dumps([(m.dtype, m.head_size, m.window, m.soft_cap) for m in modules])
    command = ("python", "-c", FIND_MODULES, values)
    code, output = finished(runtime_cuda, runtime_cuda_root, tmp_path, *command)
    assert code == 0, output
    wanted = {module.name: True for module in modules} | {"compiled another": False}
    assert json.loads(output.splitlines()[-1]) == wanted
