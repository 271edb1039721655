"""What the chart renders for its values, and which values it refuses. Needs helm, no cluster."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it ships no types
import pytest
import yaml

from cluster.harness.apiclient import Object
from cluster.harness.charts import CHART, Helm, environment, of_kind, only
from fairlead_operator.commands.operator_flags import read
from fairlead_operator.decide.children.podtemplate import pod_template
from fairlead_operator.resource.kinds import NAME_LABEL
from fairlead_operator.resource.resource import InferenceDeployment
from fairlead_operator.resource.settings import Settings
from support.operator_bodies import resource

pytestmark = pytest.mark.cluster("helm", "helm3")  # whose hook builds helm


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tmp_path_factory.mktemp("helm"))


def container(bodies: list[Object]) -> Object:
    container: Object = only(bodies, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return container


def settings(bodies: list[Object]) -> Settings:
    """The settings that the operator reads from the rendered arguments and environment."""
    pod = {"metadata": {"name": "pod-0", "namespace": "home"}}
    one = container(bodies)
    return read(one["args"], environment(one, pod), "host")


def rules(bodies: list[Object]) -> list[Object]:
    return [
        rule for body in bodies if body["kind"] in {"Role", "ClusterRole"} for rule in body["rules"]
    ]


def places(bodies: list[Object], kind: str) -> dict[str, str]:
    return {
        body["metadata"]["namespace"]: body["metadata"]["name"] for body in of_kind(bodies, kind)
    }


ALL = {
    "default": (),
    "further namespaces": ("--set", "scope.namespaces={a,b}"),
    "cluster": (
        "--set",
        "scope.cluster=true",
        "--set",
        "modelCache.create=true",
        "--set",
        "admission.create=true",
    ),
}


@pytest.mark.parametrize("program", ["helm", "helm3"])
@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_lint_finds_nothing(tmp_path: Path, program: str, values: tuple[str, ...]) -> None:
    # helm 3, built from its module, assumes Kubernetes 1.20.
    version = ("--kube-version=1.36.0",) if program == "helm3" else ()
    Helm(tmp_path, program).run("lint", "--strict", str(CHART), *values, *version)


def test_namespaced_mode_has_roles_where_it_serves_and_nowhere_else(helm: Helm) -> None:
    bodies = helm.render("--set", "scope.namespaces={a,b,home}")
    assert not of_kind(bodies, "ClusterRole") + of_kind(bodies, "ClusterRoleBinding")
    serving = [
        body for body in of_kind(bodies, "Role") if not body["metadata"]["name"].endswith("-lease")
    ]
    assert sorted(body["metadata"]["namespace"] for body in serving) == ["a", "b", "home"]
    assert serving[0]["rules"] == serving[1]["rules"] == serving[2]["rules"]
    assert settings(bodies).namespaces == ("home", "a", "b")
    assert settings(bodies).lease_namespace == "home"


def test_by_default_only_the_releases_own_namespace_is_touched(helm: Helm) -> None:
    bodies = helm.render()
    assert {body["metadata"]["namespace"] for body in bodies} == {"home"}
    assert settings(bodies).namespaces == ("home",)


def test_cluster_mode_has_one_cluster_role_and_the_lease_role(helm: Helm) -> None:
    bodies = helm.render("--set", "scope.cluster=true")
    role, binding = only(bodies, "ClusterRole"), only(bodies, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert role["rules"] == next(
        body["rules"]
        for body in of_kind(helm.render(), "Role")
        if body["metadata"]["name"] == "rel-fairlead"
    )
    assert [body["metadata"]["name"] for body in of_kind(bodies, "Role")] == ["rel-fairlead-lease"]
    assert settings(bodies).namespaces == ()
    assert settings(bodies).lease_namespace == "home"


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_every_binding_names_a_role_and_the_account_that_exist(
    helm: Helm, values: tuple[str, ...]
) -> None:
    bodies = helm.render(*values, "--set", "serviceAccount.name=own")
    roles = {(b["kind"], b["metadata"].get("namespace"), b["metadata"]["name"]) for b in bodies}
    bindings = of_kind(bodies, "RoleBinding") + of_kind(bodies, "ClusterRoleBinding")
    for binding in bindings:
        reference = binding["roleRef"]
        assert (reference["kind"], binding["metadata"].get("namespace"), reference["name"]) in roles
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "own", "namespace": "home"}
        ]
    assert ("ServiceAccount", "home", "own") in roles
    assert len(bindings) == len(of_kind(bodies, "Role")) + len(of_kind(bodies, "ClusterRole"))
    assert only(bodies, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "own"


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_no_rule_reaches_secrets_containers_rights_or_everything(
    helm: Helm, values: tuple[str, ...]
) -> None:
    forbidden = {
        "*",
        "secrets",
        "serviceaccounts",
        "configmaps",
        "nodes",
        "namespaces",
        "roles",
        "clusterroles",
    }
    for rule in rules(helm.render(*values)):
        named = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
        assert not named & forbidden
        assert not {"escalate", "bind", "impersonate", "deletecollection"} & named
        assert not [
            name
            for name in rule["resources"]
            if "/" in name and name != "inferencedeployments/status"
        ]


def test_claims_are_in_the_role_only_where_the_operator_may_create_them(helm: Helm) -> None:
    def verbs(*values: str) -> set[str]:
        return {
            verb
            for rule in rules(helm.render(*values))
            for verb in rule["verbs"]
            if "persistentvolumeclaims" in rule["resources"]
        }

    assert verbs() == set()
    assert verbs("--set", "modelCache.create=true") >= {"list", "watch", "create"}
    assert "delete" not in verbs("--set", "modelCache.create=true")
    assert settings(helm.render("--set", "modelCache.create=true")).create_model_cache
    assert not settings(helm.render()).create_model_cache


def test_the_allow_lists_reach_the_operator(helm: Helm) -> None:
    allow = {
        "images": [r"registry\.test/[a-z]+@sha256:.*", "a|b"],
        "serviceAccounts": ["reader-[0-9]+"],
        "priorityClasses": ["high", 'odd"quote'],
        "labels": ["tier", r"example\.com/.*"],
        "annotations": [r"prometheus\.io/.*"],
        "remoteCode": True,
    }
    seen = settings(
        helm.render(
            "--set-json", "allow=" + json.dumps(allow), "--set", "hub.endpoint=https://hub.test"
        )
    )
    assert list(seen.allowed_images) == allow["images"]
    assert list(seen.allowed_service_accounts) == allow["serviceAccounts"]
    assert list(seen.allowed_priority_classes) == allow["priorityClasses"]
    assert list(seen.allowed_labels) == allow["labels"]
    assert list(seen.allowed_annotations) == allow["annotations"]
    assert seen.allow_remote_code
    assert seen.hub == "https://hub.test"
    default = settings(helm.render())
    assert (
        default.allowed_images + default.allowed_service_accounts + default.allowed_priority_classes
        == ()
    )
    assert default.allowed_labels + default.allowed_annotations == ()
    assert not default.allow_remote_code


def test_the_proxy_and_the_certificates_reach_the_operator_and_the_pods_that_download(
    helm: Helm,
) -> None:
    proxy = {"http": "http://p.test:3128", "https": "http://p.test:3129", "no": ".svc,10.0.0.0/8"}
    bundle = "caBundle.configMap=roots,caBundle.key=all.pem"
    bodies = helm.render("--set-json", "proxy=" + json.dumps(proxy), "--set", bundle)
    seen = settings(bodies)
    assert seen.proxies == proxy
    roots = {"name": "ca-bundle", "configMap": {"name": "roots"}}
    template = pod_template(resource(model={"source": "owner/name"}), seen)["spec"]
    operator = only(bodies, "Deployment")["spec"]["template"]["spec"]
    for pod, one in (
        (operator, operator["containers"][0]),
        (template, template["initContainers"][0]),
    ):
        (mount,) = [m for m in one["volumeMounts"] if m["name"] == "ca-bundle"]
        assert mount["readOnly"]
        assert roots in pod["volumes"]
        environ = {entry["name"]: entry.get("value") for entry in one["env"]}
        assert environ["SSL_CERT_FILE"] == f"{mount['mountPath']}/all.pem"
    assert [environ[f"{name.upper()}_PROXY"] for name in proxy] == list(proxy.values())
    default = helm.render()
    assert settings(default).proxies == {}
    assert settings(default).ca_config_map == ""
    assert "SSL_CERT_FILE" not in json.dumps(default)


def test_on_openshift_no_pod_has_a_fixed_user_or_group(helm: Helm) -> None:
    """Its SCC restricted-v2 sets both, from the range of the namespace, and refuses others."""
    openshift = ("--api-versions", "security.openshift.io/v1")
    cached = resource(
        model={"source": "owner/name"}, modelCache={"type": "PVC", "claimName": "weights"}
    )

    def fixed(*values: str) -> list[Any]:
        bodies = helm.render(*values)
        text = json.dumps([bodies, pod_template(cached, settings(bodies))])
        return re.findall(r'"(runAsUser|runAsGroup|fsGroup|supplementalGroups)": (\d+)', text)

    assert fixed(*openshift) == []
    assert fixed() == [("fsGroup", "10001")]
    assert fixed(*openshift, "--set", "fsGroup=5") == [("fsGroup", "5")]


def test_peers_of_the_admin_port_are_the_operators_pods_and_metrics_from(helm: Helm) -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"team": "metrics"}}}
    bodies = helm.render("--set-json", "metrics.from=" + json.dumps([prometheus]))
    own, further = settings(bodies).admin_peers
    assert further == prometheus
    assert own["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "home"}}
    labels = only(bodies, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert own["podSelector"]["matchLabels"].items() <= labels
    client = only(bodies, "Pod")["metadata"]["labels"].items()
    assert not own["podSelector"]["matchLabels"].items() <= client, (
        "the test's pod is not an operator"
    )


def test_the_operators_metrics_have_a_service_that_finds_its_pods(helm: Helm) -> None:
    bodies = helm.render()
    service, pod = only(bodies, "Service"), only(bodies, "Deployment")["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert (
        not service["spec"]["selector"].items() <= only(bodies, "Pod")["metadata"]["labels"].items()
    )
    (port,) = service["spec"]["ports"]
    (container,) = pod["spec"]["containers"]
    assert {"name": port["targetPort"], "containerPort": port["port"]} in container["ports"]
    assert f"--probe-port={port['port']}" in container["args"]
    assert not of_kind(helm.render("--set", "metrics.service=false"), "Service")


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_the_admission_policy_is_bound_where_the_operator_serves(
    helm: Helm, values: tuple[str, ...]
) -> None:
    bodies = helm.render(*values, "--set", "admission.create=true")
    policy = only(bodies, "ValidatingAdmissionPolicy")
    binding = only(bodies, "ValidatingAdmissionPolicyBinding")["spec"]
    assert binding["policyName"] == policy["metadata"]["name"] == "rel-fairlead.home"
    bound = (
        binding.get("matchResources", {}).get("namespaceSelector", {}).get("matchExpressions", [{}])
    )
    assert tuple(bound[0].get("values", ())) == settings(bodies).namespaces
    assert not of_kind(helm.render(), "ValidatingAdmissionPolicy")


def test_a_digest_wins_over_the_tag_and_the_tag_over_the_charts_version(helm: Helm) -> None:
    digest = "sha256:" + "0a" * 32
    bodies = helm.render(
        "--set",
        f"image.digest={digest},image.tag=v7,runtime.image.tag=v8,runtime.image.repository=r:5000/x",
    )
    assert container(bodies)["image"] == f"docker.io/fairlead/operator@{digest}"
    assert settings(bodies).runtime_image == "r:5000/x:v8"
    default = helm.render()
    version = only(default, "Deployment")["metadata"]["labels"]["app.kubernetes.io/version"]
    assert container(default)["image"] == f"docker.io/fairlead/operator:{version}"
    assert container(default)["imagePullPolicy"] == "IfNotPresent"
    assert settings(default).runtime_image == f"docker.io/fairlead/runtime:{version}"
    client = only(default, "Pod")["spec"]["containers"][0]
    assert client["image"] == container(default)["image"]


def test_a_registry_replaces_host_and_path_of_all_images(helm: Helm) -> None:
    digest = "sha256:" + "0b" * 32
    mirror = "registry.test:5000/mirror/llm"
    accelerator = "runtime.acceleratorImage.repository=r:5000/x/gpu"
    bodies = helm.render("--set", f"registry={mirror},runtime.image.digest={digest},{accelerator}")
    version = only(bodies, "Deployment")["metadata"]["labels"]["app.kubernetes.io/version"]
    assert container(bodies)["image"] == f"{mirror}/operator:{version}"
    assert settings(bodies).image_for(0) == f"{mirror}/runtime@{digest}"
    assert settings(bodies).image_for(1) == f"{mirror}/gpu:{version}-cuda"


DIGEST = "sha256:" + "0c" * 32
# Values, then the image without and with accelerators; V is the chart's version. Those of earlier
# charts, which knew one image, have one for both.
RUNTIMES = {
    "default": ("", "docker.io/fairlead/runtime:V", "docker.io/fairlead/runtime:V-cuda"),
    "earlier, kept by --reuse-values": (
        "runtime.acceleratorImage=null",
        "docker.io/fairlead/runtime:V",
        "docker.io/fairlead/runtime:V-cuda",
    ),
    "earlier, a tag": (
        "runtime.image.tag=V-cuda",
        "docker.io/fairlead/runtime:V-cuda",
        "docker.io/fairlead/runtime:V-cuda",
    ),
    "earlier, a tag kept by --reuse-values": (
        "runtime.image.tag=v8,runtime.acceleratorImage=null",
        "docker.io/fairlead/runtime:v8",
        "docker.io/fairlead/runtime:v8",
    ),
    "earlier, a digest": (
        f"runtime.image.digest={DIGEST}",
        f"docker.io/fairlead/runtime@{DIGEST}",
        f"docker.io/fairlead/runtime@{DIGEST}",
    ),
    "earlier, a repository": ("runtime.image.repository=r:5000/x", "r:5000/x:V", "r:5000/x:V"),
    "a tag of each": (
        "runtime.image.tag=v8,runtime.acceleratorImage.tag=v9",
        "docker.io/fairlead/runtime:v8",
        "docker.io/fairlead/runtime:v9",
    ),
    "a digest of one": (
        f"runtime.image.repository=r/x,runtime.acceleratorImage.digest={DIGEST}",
        "r/x:V",
        f"r/x@{DIGEST}",
    ),
    "a repository of one": (
        "runtime.image.tag=v8,runtime.acceleratorImage.repository=r/gpu",
        "docker.io/fairlead/runtime:v8",
        "r/gpu:V-cuda",
    ),
}


@pytest.mark.parametrize(("values", "cpu", "accelerator"), RUNTIMES.values(), ids=RUNTIMES)
def test_each_kind_of_pod_has_its_image_and_values_of_one_image_name_both(
    helm: Helm, values: str, cpu: str, accelerator: str
) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    bodies = helm.render("--set", values.replace("V", version))
    both = [settings(bodies).image_for(count) for count in (0, 1)]
    assert both == [cpu.replace("V", version), accelerator.replace("V", version)]
    assert all(settings(bodies).allows_image(image) for image in both)


def test_the_secrets_for_a_registry_are_those_of_the_operator_and_of_its_pods(helm: Helm) -> None:
    bodies = helm.render("--set", "imagePullSecrets[0].name=one,imagePullSecrets[1].name=two")
    secrets = [{"name": "one"}, {"name": "two"}]
    assert only(bodies, "Deployment")["spec"]["template"]["spec"]["imagePullSecrets"] == secrets
    assert only(bodies, "Pod")["spec"]["imagePullSecrets"] == secrets
    asked = resource(podTemplate={"imagePullSecrets": [{"name": "own"}, {"name": "two"}]})
    pods = [
        pod_template(one, settings(bodies))["spec"]["imagePullSecrets"]
        for one in (resource(), asked)
    ]
    assert pods == [secrets, [{"name": "own"}, {"name": "two"}, {"name": "one"}]]
    assert settings(helm.render()).image_pull_secrets == ()


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_the_notes_name_the_served_namespaces_and_a_resource_in_one_of_them(
    helm: Helm, values: tuple[str, ...]
) -> None:
    notes = helm.notes(*values)
    one = settings(helm.render(*values))
    served = one.namespaces
    first = notes.splitlines()[0]
    assert first.endswith(f" serves {', '.join(served) or 'every namespace'}.")
    assert f"run {one.image_for(0)},\nthose with accelerators {one.image_for(1)}.\n" in notes
    assert ("NoOperator" in notes) is ("scope.namespaces" in notes) is bool(served)
    command, rest = notes.split("<<'YAML'\n")
    assert command.endswith("  kubectl apply -n home -f - ")
    assert "kubectl wait -n home " in rest
    body = yaml.safe_load(rest.split("\n  YAML\n")[0])
    body["metadata"] |= {"namespace": "home", "uid": "u"}
    assert InferenceDeployment.from_body(body).spec.model.origin.kind == "demo"
    (upgrade,) = re.findall(r"^ *(helm show crds .*)$", notes, re.MULTILINE)
    page = (CHART.parents[1] / "docs" / "install.md").read_text()
    assert upgrade.replace("CHART", "charts/fairlead") in page


def test_the_notes_say_that_no_prometheus_may_read_the_pods(helm: Helm) -> None:
    monitored = ("--set", "metrics.podMonitor.create=true")
    admitted = ("--set-json", 'metrics.from=[{"podSelector": {}}]')
    said = [
        "metrics.from" in notes
        for notes in (helm.notes(), helm.notes(*monitored), helm.notes(*monitored, *admitted))
    ]
    assert said == [False, True, False]


MONITORING = ("PodMonitor", "PrometheusRule", "ConfigMap")


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_pod_monitors_find_the_operator_and_the_pods_of_every_served_namespace(
    helm: Helm, values: tuple[str, ...]
) -> None:
    bodies = helm.render(
        *values, "--set", "metrics.podMonitor.create=true,metrics.podMonitor.labels.team=x"
    )
    schema = json.loads(Path(__file__).with_name("podmonitor.schema.json").read_text())
    for body in of_kind(bodies, "PodMonitor"):
        jsonschema.Draft202012Validator(schema).validate(body)
        assert body["metadata"]["labels"]["team"] == "x"
    operator, runtime = (body["spec"] for body in of_kind(bodies, "PodMonitor"))
    pod = only(bodies, "Deployment")["spec"]["template"]
    assert operator["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = operator["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in container(bodies)["ports"]}
    served = settings(bodies).namespaces
    wanted = {"matchNames": list(served)} if served else {"any": True}
    assert runtime["namespaceSelector"] == wanted
    template = pod_template(resource(), settings(bodies))
    (expression,) = runtime["selector"]["matchExpressions"]
    assert expression == {"key": NAME_LABEL, "operator": "Exists"}
    assert NAME_LABEL in template["metadata"]["labels"]
    assert runtime["podTargetLabels"] == [NAME_LABEL]
    (endpoint,) = runtime["podMetricsEndpoints"]
    assert endpoint["port"] in {p["name"] for p in template["spec"]["containers"][0]["ports"]}


def test_rules_and_dashboard_are_the_shipped_files(helm: Helm) -> None:
    create = ("rules", "dashboard")
    bodies = helm.render("--set", ",".join(f"metrics.{name}.create=true" for name in create))
    rule, dashboard = only(bodies, "PrometheusRule"), only(bodies, "ConfigMap")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = json.loads(dashboard["data"]["fairlead.json"])
    assert shown == json.loads((CHART / "files" / "dashboard.json").read_text())
    assert not [body["kind"] for body in helm.render() if body["kind"] in MONITORING]


@pytest.mark.parametrize("kind", ["Deployment", "Pod"])
def test_pods_are_restricted_and_their_file_system_is_read_only(helm: Helm, kind: str) -> None:
    body = only(helm.render(), kind)
    spec = body["spec"]["template"]["spec"] if kind == "Deployment" else body["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (one,) = spec["containers"]
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert one["resources"]["limits"]["memory"]
    assert spec["enableServiceLinks"] is False
    assert all(set(volume) == {"name", "emptyDir"} for volume in spec.get("volumes", []))


def test_pods_take_labels_of_the_user_but_never_lose_their_own(helm: Helm) -> None:
    labels = {"app.kubernetes.io/instance": "stolen", "team": "x"}
    bodies = helm.render("--set-json", "podLabels=" + json.dumps(labels))
    seen = only(bodies, "Deployment")["spec"]
    assert seen["selector"]["matchLabels"].items() <= seen["template"]["metadata"]["labels"].items()
    assert seen["template"]["metadata"]["labels"]["team"] == "x"


@pytest.mark.parametrize("release", ["fairlead", "my-fairlead", "7.up", "r" * 53])
def test_names_are_valid_for_every_name_of_a_release(helm: Helm, release: str) -> None:
    bodies = helm.render(release=release)
    assert re.fullmatch(
        r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", only(bodies, "InferenceDeployment")["metadata"]["name"]
    )
    for body in bodies:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", body["metadata"]["name"])
    assert len(
        {(b["kind"], b["metadata"].get("namespace"), b["metadata"]["name"]) for b in bodies}
    ) == len(bodies)


REFUSED: dict[str, Any] = {
    "replicaCount": 2,
    "scope/clusterWide": True,
    "scope/cluster": "yes",
    "scope/namespaces": "a",
    "scope/namespaces/0": ["Not_A_Name"],
    "image/repository": "registry.test/x:latest",
    "image/tag": 5,
    "registry": "https://registry.test",
    "imagePullSecrets/0": ["registry"],
    "metrics/podMonitor/interval": "often",
    "image/digest": "sha256:short",
    "image/pullPolicy": "Sometimes",
    "runtime/image": "registry.test/runtime:1",
    "runtime/image/pullPolicy": "Always",
    "runtime/acceleratorImage/repository": "r/x:latest",
    "allow/images/0": ["("],
    "allow/serviceAccounts/0": ["two\nlines"],
    "allow/priorityClasses": "high",
    "allow/remoteCode": "true",
    "hub/endpoint": "hub.test",
    "modelCache/create": 1,
    "metrics/from/0": [{}],
    "replicas": 6,
    "resources/request": {"cpu": 1},
    "resources/limits/memory": "lots",
    "tolerations/0": ["gpu"],
    "nodeSelector/disk": {"ssd": True},
    "serviceAccount/name": "No Name",
    "test/timeoutSeconds": 1,
}


@pytest.mark.parametrize("path", REFUSED)
def test_a_bad_value_is_refused_by_its_name(helm: Helm, path: str) -> None:
    value = REFUSED[path]
    parents, _, last = path.removesuffix("/0").rpartition("/")
    nested: Any = {last: value}
    for key in reversed(parents.split("/") if parents else []):
        nested = {key: nested}
    top = next(iter(nested))
    done = helm.ask("template", "rel", str(CHART), "--set-json", json.dumps(nested))
    assert done.returncode == 1, top
    unknown = rf"at '/?{re.escape(parents)}': additional properties '{re.escape(last)}' not allowed"
    assert re.search(rf"at '/{re.escape(path)}'|{unknown}", done.stderr), done.stderr


def test_a_cluster_needs_no_list_of_namespaces_and_refuses_one(helm: Helm) -> None:
    done = helm.ask(
        "template", "rel", str(CHART), "--set", "scope.cluster=true,scope.namespaces={a}"
    )
    assert done.returncode == 1
    assert "scope.namespaces: leave it empty: with scope.cluster every" in done.stderr
