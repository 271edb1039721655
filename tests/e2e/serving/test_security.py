"""What a pod may do, found out from inside the pods."""

from collections.abc import Callable

import pytest

from cluster.harness.apiclient import Api, ApiError
from e2e.harness.installation import NAMESPACE, OPERATOR, Installation
from e2e.harness.served import Served

pytestmark = pytest.mark.e2e
TOOLS = (
    *("cc", "gcc", "g++", "c++", "clang", "ld", "as", "make", "nvcc", "rustc", "go"),
    *("apt", "apt-get", "dpkg", "pip", "pip3", "uv", "conda", "npm"),
)
Inside = Callable[[str], str]


@pytest.fixture
def runtime_pod(chat: Served) -> str:
    return min(chat.names())


@pytest.fixture(params=["runtime", "operator"])
def inside(
    request: pytest.FixtureRequest, installation: Installation, api: Api, runtime_pod: str
) -> Inside:
    """A shell in a pod of each image: what a script prints."""
    name = runtime_pod
    if request.param == "operator":
        (pod,) = api.items("Pod", NAMESPACE, labelSelector=OPERATOR)
        name = pod["metadata"]["name"]
    return lambda script: installation.kubectl("exec", name, "--", "sh", "-c", script)


def test_the_process_has_no_privilege(inside: Inside) -> None:
    """Every process of the container, found in its own /proc."""
    told = inside("grep -hE '^(Uid|CapPrm|CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/1/status")
    fields = dict(line.split(":\t") for line in told.splitlines())
    assert "0" not in fields["Uid"].split()
    assert {int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {0}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2", "a filter of system calls is on"


def test_the_root_file_system_cannot_be_written(inside: Inside) -> None:
    folders = inside("for d in / /etc /usr /opt /var; do touch $d/x 2>&1 || true; done")
    assert folders.count("Read-only file system") == 5
    assert inside("touch /tmp/x && echo written") == "written\n"


def test_there_is_no_compiler_and_no_package_manager(inside: Inside) -> None:
    assert inside(f"for t in {' '.join(TOOLS)}; do command -v $t || true; done") == ""
    assert inside("python -c 'import importlib.util as u; print(u.find_spec(\"pip\"))'") == "None\n"


def test_a_runtime_pod_has_no_token(installation: Installation, runtime_pod: str) -> None:
    script = "ls /var/run/secrets 2>&1 || true"
    told = installation.kubectl("exec", runtime_pod, "--", "sh", "-c", script)
    assert "No such file" in told


def test_the_namespace_enforces_restricted(api: Api, runtime_pod: str) -> None:
    """The pods above were admitted by rules that refuse others."""
    meta = {"name": "bold", "namespace": NAMESPACE}
    spec = {"containers": [{"name": "bold", "image": "x", "securityContext": {"privileged": True}}]}
    with pytest.raises(ApiError, match='violates PodSecurity "restricted'):
        api.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
