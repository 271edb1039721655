"""The children of a resource, compared as whole values: every field of a child is a decision."""

from dataclasses import replace
from typing import Any

import pytest

from fairlead_operator.decide.children.manifests import SURGE, keeps_weights, render
from fairlead_operator.decide.children.podtemplate import model_argument, pod_template
from fairlead_operator.resource.settings import Settings
from fairlead_runtime.settings.engine_config import EngineConfig
from support.operator_bodies import AFFINITY, SETTINGS, VOLUMES, Object, merged, resource

OWNER = {
    "apiVersion": "serving.fairlead.dev/v1alpha1",
    "kind": "InferenceDeployment",
    "name": "chat",
    "uid": "uid-1",
    "controller": True,
    "blockOwnerDeletion": False,
}
SELECTOR = {"serving.fairlead.dev/name": "chat", "serving.fairlead.dev/uid": "uid-1"}
LABELS = {**SELECTOR, "app.kubernetes.io/managed-by": "fairlead"}
META = {"name": "chat", "namespace": "ns", "labels": LABELS, "ownerReferences": [OWNER]}


def children(settings: Settings = SETTINGS, count: int = 1, **spec: Any) -> dict[str, Object]:
    return {one["kind"]: one for one in render(resource(**spec), settings, count, SURGE)}


def test_the_service_carries_the_resources_name_and_selects_by_its_uid() -> None:
    assert children(service={"port": 8080})["Service"] == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**META, "annotations": {"serving.fairlead.dev/service-annotations": ""}},
        "spec": {
            "type": "ClusterIP",
            "selector": SELECTOR,
            "ports": [{"name": "http", "port": 8080, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def test_the_deployment_of_the_demo_model_on_a_cpu() -> None:
    deployment = children(count=3)["Deployment"]
    template = deployment["spec"].pop("template")
    assert deployment == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": META,
        "spec": {
            "replicas": 3,
            "selector": {"matchLabels": SELECTOR},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "minReadySeconds": 5,
            "progressDeadlineSeconds": 1800,
            "revisionHistoryLimit": 2,
        },
    }
    revision = template["metadata"]["labels"].pop("serving.fairlead.dev/revision")
    assert len(revision) == 10
    assert template == {
        "metadata": {
            "labels": {**LABELS, **SELECTOR, "llm-d.ai/engine-type": "vllm"},
            "annotations": {
                "kubectl.kubernetes.io/default-container": "runtime",
                "traffic.sidecar.istio.io/excludeInboundPorts": "9000",
                "config.linkerd.io/skip-inbound-ports": "9000",
            },
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 315,  # grace 5 + timeout 300 + 10
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "runtime",
                    "image": "registry.test/fairlead-runtime:1",
                    "command": ["fairlead"],
                    "args": [
                        "serve",
                        "demo:",
                        "--host=::",
                        "--served-name=chat",
                        "--device=cpu",
                        "--shared-memory=1.0",
                    ],
                    "env": [
                        {"name": "HOME", "value": "/tmp"},
                        {"name": "USER", "value": "runtime"},
                        {"name": "HF_HOME", "value": "/models"},
                        {"name": "HF_HUB_DISABLE_TELEMETRY", "value": "1"},
                        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
                        {"name": "HF_HUB_OFFLINE", "value": "1"},
                    ],
                    "ports": [
                        {"name": "http", "containerPort": 8000, "protocol": "TCP"},
                        {"name": "admin", "containerPort": 9000, "protocol": "TCP"},
                    ],
                    "startupProbe": {
                        "httpGet": {"path": "/readyz", "port": "admin"},
                        "periodSeconds": 2,
                        "timeoutSeconds": 2,
                        "failureThreshold": 900,
                    },
                    "readinessProbe": {
                        "httpGet": {"path": "/readyz", "port": "admin"},
                        "periodSeconds": 2,
                        "timeoutSeconds": 5,
                        "failureThreshold": 1,
                    },
                    "livenessProbe": {
                        "httpGet": {"path": "/healthz", "port": "admin"},
                        "periodSeconds": 10,
                        "timeoutSeconds": 5,
                        "failureThreshold": 3,
                    },
                    "resources": {
                        "requests": {"cpu": "4", "memory": "16Gi"},
                        "limits": {"memory": "16Gi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                        "runAsNonRoot": True,
                    },
                    "terminationMessagePolicy": "File",
                    "volumeMounts": [
                        {"name": "tmp", "mountPath": "/tmp"},
                        {"name": "shm", "mountPath": "/dev/shm"},
                    ],
                }
            ],
            "volumes": [
                {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
            ],
            "tolerations": [
                {
                    "key": f"node.kubernetes.io/{taint}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 30,
                }
                for taint in ("not-ready", "unreachable")
            ],
        },
    }


def test_pods_with_their_weights_in_the_claim_have_no_egress() -> None:
    commit: Object = {
        "model": {"source": "a/b", "revision": "0" * 40},
        "modelCache": {"type": "PVC", "claimName": "w"},
    }
    assert keeps_weights(resource(**commit))
    for change in (
        {"model": {"revision": "main"}},
        {"modelCache": {"type": "None"}},
    ):
        assert not keeps_weights(resource(**merged(commit, change))), change
    for cached in (False, True):
        made = render(resource(**commit), SETTINGS, 1, SURGE, cached=cached)
        (policy,) = [one for one in made if one["kind"] == "NetworkPolicy"]
        assert bool(policy["spec"]["egress"]) is not cached
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_without_readers_the_admin_port_is_closed_and_the_demo_has_no_egress() -> None:
    assert children()["NetworkPolicy"] == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": META,
        "spec": {
            "podSelector": {"matchLabels": SELECTOR},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"port": 8000, "protocol": "TCP"}]}],
            "egress": [],
        },
    }


def test_the_admin_port_opens_to_its_readers_only_and_a_hub_model_may_reach_the_hub() -> None:
    operator = {"podSelector": {"matchLabels": {"app": "op"}}}
    settings = Settings(admin_peers=(operator,), hub="https://mirror.test:8443")
    spec = children(settings, model={"source": "owner/name"})["NetworkPolicy"]["spec"]
    assert spec["ingress"][1] == {"from": [operator], "ports": [{"port": 9000, "protocol": "TCP"}]}
    assert [p["port"] for p in spec["egress"][0]["ports"]] == [53, 53, 5353, 5353, 8443]


def test_the_network_policy_can_be_turned_off() -> None:
    assert "NetworkPolicy" not in children(security={"networkPolicy": False})


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ({}, False),
        ({"replicas": 2}, True),
        ({"autoscaling": {"minReplicas": 1, "maxReplicas": 2}}, True),
        ({"autoscaling": {"minReplicas": 1, "maxReplicas": 1}, "replicas": 5}, False),
    ],
)
def test_a_disruption_budget_is_there_when_there_can_be_two_pods(
    spec: Object, *, wanted: bool
) -> None:
    assert ("PodDisruptionBudget" in children(**spec)) is wanted


def test_a_hub_model_is_fetched_first_and_then_served_offline() -> None:
    spec: Object = {
        "model": {
            "source": "owner/name",
            "revision": "abc",
            "tokenSecretRef": {"name": "hub", "key": "token"},
        },
        "modelCache": {"type": "PVC", "size": "50Gi"},
    }
    made = children(**spec)
    pod = made["Deployment"]["spec"]["template"]["spec"]
    fetch, runtime = pod["initContainers"][0], pod["containers"][0]
    assert fetch["args"] == ["fetch", "hf://owner/name", "--host=::", "--revision=abc"]
    assert "ports" not in fetch
    names = {v["name"]: v["value"] for v in fetch["env"]}
    assert names["HF_ENDPOINT"] == "https://huggingface.co"
    assert names["HF_TOKEN_PATH"] == "/var/run/fairlead/hub-token/token"
    assert "HF_HUB_OFFLINE" not in names
    assert runtime["args"][:2] == ["serve", "hf://owner/name"]
    assert "--revision=abc" in runtime["args"]
    assert {v["name"]: v["value"] for v in runtime["env"]}["HF_HUB_OFFLINE"] == "1"
    mounts = {m["name"] for m in runtime["volumeMounts"]}
    assert "hub-token" not in mounts, "the runtime needs no token"
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "chat-model-cache"}} in pod[
        "volumes"
    ]
    assert made["PersistentVolumeClaim"]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "50Gi"}},
    }


def test_a_model_in_a_claim_is_mounted_read_only() -> None:
    pod = children(model={"source": "pvc://weights/llama/8b"})["Deployment"]["spec"]["template"][
        "spec"
    ]
    claim = {"claimName": "weights", "readOnly": True}
    assert {"name": "model", "persistentVolumeClaim": claim} in pod["volumes"]
    assert pod["containers"][0]["args"][:2] == ["serve", "/model/llama/8b"]
    assert "initContainers" not in pod


def test_accelerators_are_requested_tolerated_and_selected() -> None:
    accelerator = {"count": 1, "nodeSelector": {"gpu": "h200"}}
    spec: Object = {
        "resources": {"accelerator": accelerator},
        "podTemplate": {"nodeSelector": {"zone": "a"}},
    }
    pod = children(**spec)["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["nodeSelector"] == {"gpu": "h200", "zone": "a"}
    assert "--device=cuda" in pod["containers"][0]["args"], "never the CPU where one is missing"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod[
        "tolerations"
    ]


@pytest.mark.parametrize(
    ("count", "named", "image"),
    [
        (0, "", "r:1"),
        (1, "", "r:1-cuda"),
        (2, "", "r:1-cuda"),
        (0, "own:1", "own:1"),
        (1, "own:1", "own:1"),
    ],
)
def test_the_image_is_that_of_pods_with_or_without_accelerators_or_the_resources_own(
    count: int, named: str, image: str
) -> None:
    settings = Settings(runtime_image="r:1", accelerator_image="r:1-cuda")
    fetching: Object = {
        "model": {"source": "hf://owner/name"},
        "resources": {"accelerator": {"count": count}},
        "engine": {"image": named, "tensorParallel": max(count, 1)},
    }
    pod = pod_template(resource(**fetching), settings)["spec"]
    containers = [*pod["initContainers"], *pod["containers"]]
    assert [container["image"] for container in containers] == [image, image]


def test_a_model_over_several_accelerators_gets_them_and_shared_memory() -> None:
    resources = {"accelerator": {"count": 4}, "memory": "64Gi", "sharedMemory": "3Gi"}
    split = resource(resources=resources, engine={"tensorParallel": 4})
    pod = pod_template(split, SETTINGS)["spec"]
    (container,) = pod["containers"]
    wanted = {"memory": "64Gi", "nvidia.com/gpu": "4"}
    assert container["resources"]["limits"] == wanted
    assert container["resources"]["requests"].items() >= wanted.items()
    assert {"--tensor-parallel=4", "--shared-memory=3.0"} <= set(container["args"])
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_a_toleration_of_a_lost_node_replaces_ours() -> None:
    longer = {
        "key": "node.kubernetes.io/unreachable",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 600,
    }
    every = {"operator": "Exists"}
    template = pod_template(resource(podTemplate={"tolerations": [longer, every]}), SETTINGS)
    ours = {**longer, "key": "node.kubernetes.io/not-ready", "tolerationSeconds": 30}
    assert template["spec"]["tolerations"] == [longer, every, ours]


def test_api_keys_come_as_a_file_never_as_text() -> None:
    pod = children(security={"apiKeySecretRef": {"name": "keys", "key": "list"}})["Deployment"][
        "spec"
    ]["template"]["spec"]
    assert "--api-key-file=/var/run/fairlead/api-keys/list" in pod["containers"][0]["args"]
    secret = {
        "secretName": "keys",
        "items": [{"key": "list", "path": "list"}],
        "defaultMode": 0o444,
    }
    assert {"name": "api-keys", "secret": secret} in pod["volumes"]


def test_the_pods_arguments_are_the_resources_settings() -> None:
    one = resource(
        scheduler={"type": "fair", "maxRequests": 32, "queueTimeoutSeconds": 5},
        cache={"blockSize": 32, "cpuOffloadSpace": 2.5},
        engine={"maxModelLen": 4096, "deterministic": True, "cudaGraphs": {"enabled": "off"}},
    )
    arguments = pod_template(one, SETTINGS)["spec"]["containers"][0]["args"]
    assert EngineConfig.from_args(arguments[3:]) == replace(one.engine, device="cpu")


def test_labels_of_the_user_never_replace_ours() -> None:
    labels = pod_template(resource(podTemplate={"labels": {"team": "x"}}), SETTINGS)["metadata"][
        "labels"
    ]
    assert labels["team"] == "x"
    assert labels["serving.fairlead.dev/uid"] == "uid-1"


def test_equal_resources_have_equal_hashes_and_every_change_of_the_pod_another() -> None:
    def revision(**spec: Any) -> str:
        labels = pod_template(resource(**spec), SETTINGS)["metadata"]["labels"]
        return str(labels["serving.fairlead.dev/revision"])

    assert revision() == revision(replicas=5, service={"port": 81}, paused=True)
    changed = [
        revision(scheduler={"maxRequests": 8}),
        revision(podTemplate={"env": [{"name": "A", "value": "1"}]}),
        revision(resources={"memory": "1Gi"}),
        revision(engine={"image": "other:1"}),
    ]
    assert len({revision(), *changed}) == 5
    deadlines = {"drainTimeoutSeconds": 10, "progressDeadlineSeconds": 99}
    assert revision(rollout=deadlines) == revision(), "a deadline needs no new pod"


@pytest.mark.parametrize(
    ("source", "argument"),
    [
        ("demo:", "demo:"),
        ("owner/name", "hf://owner/name"),
        ("hf://owner/name", "hf://owner/name"),
        ("file:///opt/model", "/opt/model"),
        ("pvc://claim/a/b", "/model/a/b"),
    ],
)
def test_the_model_argument(source: str, argument: str) -> None:
    assert model_argument(resource(model={"source": source})) == argument


def written(want: Any, seen: Any) -> bool:
    """Whether everything in ``want`` is in ``seen``; empty lists are as good as none."""
    if isinstance(want, dict):
        return isinstance(seen, dict) and all(written(v, seen.get(k)) for k, v in want.items())
    if isinstance(want, list) and isinstance(seen, list):
        return len(want) == len(seen) and all(map(written, want, seen))
    return bool(want == seen)


def test_fields_of_the_pod_template_arrive_in_the_pod() -> None:
    mounts = [{"name": v["name"], "mountPath": f"/mnt/{v['name']}"} for v in VOLUMES]
    template = children(
        podTemplate={
            "runtimeClassName": "nvidia",
            "schedulerName": "volcano",
            "affinity": AFFINITY,
            "volumes": VOLUMES,
            "volumeMounts": mounts,
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
        }
    )["Deployment"]["spec"]["template"]
    spec = template["spec"]
    assert (spec["runtimeClassName"], spec["schedulerName"]) == ("nvidia", "volcano")
    assert written(AFFINITY, spec["affinity"])
    assert written(VOLUMES, spec["volumes"][2:])
    assert spec["containers"][0]["volumeMounts"][2:] == mounts
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    assert template["metadata"]["annotations"][key] == "false"


def test_annotations_of_the_service_are_written_with_the_list_of_their_keys() -> None:
    key = "service.beta.kubernetes.io/aws-load-balancer-internal"
    metadata = children(service={"annotations": {key: "true"}})["Service"]["metadata"]
    assert metadata["annotations"] == {key: "true", "serving.fairlead.dev/service-annotations": key}


@pytest.mark.parametrize("source", ["demo:", "pvc://weights/llama", "a/b"])
def test_further_ports_are_open_for_egress_with_dns(source: str) -> None:
    one: Object = {"model": {"source": source}, "security": {"egressPorts": [15012, 8080]}}
    (rule,) = children(**one)["NetworkPolicy"]["spec"]["egress"]
    tcp = {p["port"] for p in rule["ports"] if p["protocol"] == "TCP"}
    assert tcp == {53, 5353, 8080, 15012} | ({443} if source == "a/b" else set())
    assert {p["port"] for p in rule["ports"] if p["protocol"] == "UDP"} == {53, 5353}


def test_only_the_download_uses_the_proxy_and_the_certificates() -> None:
    settings = replace(
        SETTINGS,
        https_proxy="http://proxy.test:3128",
        no_proxy=".svc",
        ca_config_map="roots",
        ca_key="all.crt",
    )
    made = children(settings, model={"source": "a/b"})
    pod = made["Deployment"]["spec"]["template"]["spec"]
    fetch, runtime = pod["initContainers"][0], pod["containers"][0]
    values = {v["name"]: v["value"] for v in fetch["env"]}
    assert values["HTTPS_PROXY"] == values["https_proxy"] == "http://proxy.test:3128"
    assert values["NO_PROXY"] == ".svc"
    assert "HTTP_PROXY" not in values
    assert values["SSL_CERT_FILE"] == "/var/run/fairlead/ca/all.crt"
    assert {"name": "ca-bundle", "configMap": {"name": "roots"}} in pod["volumes"]
    assert "ca-bundle" in {m["name"] for m in fetch["volumeMounts"]}
    assert "ca-bundle" not in {m["name"] for m in runtime["volumeMounts"]}
    assert not {"HTTPS_PROXY", "SSL_CERT_FILE"} & {v["name"] for v in runtime["env"]}
    ports = made["NetworkPolicy"]["spec"]["egress"][0]["ports"]
    assert {"port": 3128, "protocol": "TCP"} in ports
    demo = children(settings)["Deployment"]["spec"]["template"]["spec"]
    assert len(demo["volumes"]) == 2


def test_a_group_for_volumes_is_set_only_where_pods_write_to_a_claim() -> None:
    settings = replace(SETTINGS, fs_group=10001)
    cache: Object = {"model": {"source": "a/b"}, "modelCache": {"type": "PVC", "claimName": "w"}}
    for spec, chosen, group in (
        (cache, settings, 10001),
        (cache, SETTINGS, None),
        ({}, settings, None),
    ):
        pod = children(chosen, **spec)["Deployment"]["spec"]["template"]["spec"]
        context = pod["securityContext"]
        assert context.get("fsGroup") == group
        assert context["runAsNonRoot"] is True
        assert not {"runAsUser", "runAsGroup"} & set(context)


@pytest.mark.parametrize(
    ("size", "resources", "limit"),
    [
        ("20Gi", {}, "20Gi"),
        ("", {"memory": "8Gi"}, "16Gi"),
        ("", {"accelerator": {"count": 1, "memory": "80Gi"}}, "160Gi"),
        ("", {"accelerator": {"count": 1}}, None),
    ],
)
def test_a_pods_own_cache_has_a_limit(size: str, resources: Object, limit: str | None) -> None:
    made = children(model={"source": "a/b"}, modelCache={"size": size}, resources=resources)
    pod = made["Deployment"]["spec"]["template"]["spec"]
    (cache,) = [v["emptyDir"] for v in pod["volumes"] if v["name"] == "models"]
    assert cache.get("sizeLimit") == limit
    wanted = pod["initContainers"][0]["resources"]
    assert wanted["requests"].get("ephemeral-storage") == (f"{21 * 2**30}" if size else None)
    assert wanted["limits"].get("ephemeral-storage") == wanted["requests"].get("ephemeral-storage")


def test_pods_that_are_not_ready_may_be_evicted() -> None:
    spec = children(replicas=2)["PodDisruptionBudget"]["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
