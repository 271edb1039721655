"""The harness itself: it is a real cluster, starts quickly and leaves nothing behind."""

import time

import pytest

from cluster.harness import binaries
from cluster.harness.apiclient import Api, ApiError, Object, eventually
from cluster.harness.controlplane import ControlPlane
from cluster.harness.nodes import is_ready
from support.full import LONG_FORM

pytestmark = pytest.mark.cluster


def pod(namespace: str, **context: object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": namespace},
        "spec": {"containers": [{"name": "c", "image": "none", "securityContext": context}]},
    }


def test_a_second_cluster_comes_up_within_15_seconds_and_leaves_nothing_behind(
    plane: ControlPlane,
) -> None:
    began = time.monotonic()
    with ControlPlane() as second:
        with second.api() as api:
            eventually(
                lambda: api.find("ServiceAccount", "default", "default"), 15, "controllers at work"
            )
            assert api.call("GET", "/version")["gitVersion"] == binaries.KUBERNETES
        assert time.monotonic() - began <= 15 or not LONG_FORM
        processes = [part.process for part in second.parts]
        assert second.port != plane.port
    assert len(processes) == 4
    assert all(process.poll() is not None for process in processes)
    assert not second.home.exists()


def test_the_test_namespaces_refuse_pods_that_are_not_restricted(api: Api, namespace: str) -> None:
    with pytest.raises(ApiError) as refusal:
        api.create(pod(namespace, privileged=True))
    assert refusal.value.code == 403
    assert 'violates PodSecurity "restricted:latest"' in refusal.value.message


@pytest.mark.usefixtures("nodes")
def test_kwok_makes_scheduled_pods_ready_with_an_address(api: Api, namespace: str) -> None:
    body = pod(
        namespace, allowPrivilegeEscalation=False, capabilities={"drop": ["ALL"]}, runAsNonRoot=True
    )
    body["spec"]["securityContext"] = {"seccompProfile": {"type": "RuntimeDefault"}}
    api.create(body)

    def ready() -> Object | None:
        seen = api.get("Pod", namespace, "p")
        return seen if is_ready(seen) else None

    assert eventually(ready, 10, "the pod Ready")["status"]["podIP"].startswith("10.128.")


def test_without_assets_and_without_go_the_harness_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    with pytest.raises(
        binaries.NoControlPlaneError, match=r"install Go 1.26 .* or point KUBEBUILDER_ASSETS"
    ):
        binaries.program("etcd")
