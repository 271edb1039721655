"""Containers of the images as a restricted pod runs them: any user, a read-only root."""

import json
import re
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

import compile_flashinfer
from support import names_read
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
# Arguments: docker/compile_flashinfer.py, and the modules that the image should have. No GPU is
# needed to find and load one.
FIND_MODULES = """
import json, os, sys
from types import ModuleType
os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "8.0 9.0a"  # asked of a GPU otherwise
from flashinfer.jit.core import MissingJITCacheError
ours = ModuleType("compile_flashinfer")
exec(sys.argv[1], ours.__dict__)
answer = {}
for values in json.loads(sys.argv[2]):
    found = ours.Module(**values).specification()
    module = found.build_and_load()
    answer[found.name] = found.is_aot and callable(module["plan"])
other = ours.Module("float16", "float16", 96, window=False, soft_cap=True, sinks=False)
try:
    other.specification().build_and_load()
except MissingJITCacheError:
    answer["compiled another"] = False
print(json.dumps(answer))
"""
# As a start on a GPU, up to the driver's functions, which are looked for when they are called.
FIND_TRITON = """
import json, os, shutil, sys
from fairlead_kernels.gpu import triton_package
triton_package.load("fairlead_kernels.gpu.triton_kernels")
import triton
from triton.backends.nvidia import driver
sys.setdlopenflags(os.RTLD_LAZY)
found = callable(driver.CudaUtils().launch)
compilers = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
cache = triton.knobs.cache.dir
kept = sum(name.startswith("cuda_utils") for _, _, names in os.walk(cache) for name in names)
print(json.dumps({"found": found, "compilers": compilers, "cache": cache, "kept": kept}))
"""
# Any library serves as the driver's.
DRIVER = """
mkdir /tmp/driver
ln -s /usr/lib/*-linux-gnu/libm.so.6 /tmp/driver/libcuda.so.1
LD_LIBRARY_PATH=/tmp/driver exec "$@"
"""
REFUSED = """
for path in ("/x", "/opt/fairlead/x", "/etc/passwd"):
    try:
        open(path, "a")
    except OSError:
        continue
    raise SystemExit(f"{path} was opened for writing")
"""


def finished(
    image: Archive,
    root: Path,
    tmp_path: Path,
    *command: str,
    uid: int = STRANGER,
    shown: dict[str, Path] | None = None,
) -> tuple[int, str]:
    """Exit code and output of a command in a container of its own."""
    bundle = tmp_path / container_name()
    with container(image, root, bundle, list(command), uid, shown) as process:
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
def test_an_import_of_transformers_reads_no_file_of_a_model_for_its_names(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    runtime, runtime_root = of(name, request)
    code, output = finished(runtime, runtime_root, tmp_path, "python", "-c", names_read.PROGRAM)
    assert (code, output.split()[0]) == (0, "0"), output


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_runtime_image_says_that_it_finds_no_accelerator(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    runtime, runtime_root = of(name, request)
    code, output = finished(
        runtime, runtime_root, tmp_path, "fairlead", "serve", "demo:", "--device=cuda"
    )
    assert code == 2, output
    refusal = json.loads(output.splitlines()[-1])
    assert refusal["code"] == "NoAccelerator"
    assert ("is a CPU build" in refusal["message"]) is (name == "runtime")
    assert ("driver" in refusal["hint"]) is (name != "runtime")


def test_flashinfer_in_the_cuda_image_finds_each_listed_module_and_compiles_no_other(
    runtime_cuda: Archive, runtime_cuda_root: Path, tmp_path: Path
) -> None:
    _, modules = compile_flashinfer.read(ROOT / "docker/flashinfer_modules.toml")
    program = (ROOT / "docker/compile_flashinfer.py").read_text()
    values = json.dumps([asdict(module) for module in modules])
    command = ("python", "-c", FIND_MODULES, program, values)
    code, output = finished(runtime_cuda, runtime_cuda_root, tmp_path, *command)
    assert code == 0, output
    wanted = {module.name: True for module in modules} | {"compiled another": False}
    assert json.loads(output.splitlines()[-1]) == wanted


@pytest.mark.parametrize("uid", [10001, STRANGER])
def test_triton_in_the_cuda_image_compiles_our_kernels_for_gpus_as_any_user(
    runtime_cuda: Archive, runtime_cuda_root: Path, tmp_path: Path, uid: int
) -> None:
    """To machine code, by the path of a launch, with no C compiler and a read-only root."""
    command = ("env", "PYTHONPATH=/tmp/tests", "python", "/tmp/tests/support/compile_triton.py")
    shown = {"/tmp/tests": ROOT / "tests"}
    code, output = finished(
        runtime_cuda, runtime_cuda_root, tmp_path, *command, uid=uid, shown=shown
    )
    assert code == 0, output
    compiled = set(re.findall(r"^(\w+) (sm\d+) [1-9]", output, re.MULTILINE))
    kernels = {name for name, _ in compiled}
    assert {"norm", "rope_write", "activate", "multiply_int8"} <= kernels, output
    assert compiled == {(name, gpu) for name in kernels for gpu in ("sm80", "sm90")}


@pytest.mark.parametrize("uid", [10001, STRANGER])
def test_triton_in_the_cuda_image_takes_the_drivers_library_that_was_compiled_ahead(
    runtime_cuda: Archive, runtime_cuda_root: Path, tmp_path: Path, uid: int
) -> None:
    command = ("sh", "-c", DRIVER, "sh", "python", "-c", FIND_TRITON)
    code, output = finished(runtime_cuda, runtime_cuda_root, tmp_path, *command, uid=uid)
    assert code == 0, output
    assert json.loads(output.splitlines()[-1]) == {
        "found": True,
        "compilers": [],
        "cache": "/tmp/.triton/cache",
        "kept": 1,
    }


def test_triton_in_the_cuda_image_says_where_it_cannot_keep_its_kernels(
    runtime_cuda: Archive, runtime_cuda_root: Path, tmp_path: Path
) -> None:
    own = "TRITON_CACHE_DIR=/var/cache/triton"
    command = ("env", own, "sh", "-c", DRIVER, "sh", "python", "-c", FIND_TRITON)
    code, output = finished(runtime_cuda, runtime_cuda_root, tmp_path, *command)
    assert code == 0, output
    answer = json.loads(output.splitlines()[-1])
    assert (answer["found"], answer["kept"]) == (True, 1)
    assert answer["cache"].startswith("/tmp/fairlead-triton-")
    assert "it cannot keep them in /var/cache/triton (OSError: [Errno 30] Read-only" in output
