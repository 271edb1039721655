"""A small adapter between an HPA and Prometheus: the rule of the example, as a metrics API.

It does with the rule what prometheus-adapter does: it puts the namespace and the names of the pods
that the HPA selects into the rule's query and answers with one value for each pod.
"""

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from cluster.harness.apiclient import Api, Object
from e2e.harness.prometheus import Prometheus
from e2e.harness.sandbox import ADDRESS
from support.certificates import make_pair

GROUP, VERSION = "custom.metrics.k8s.io", "v1beta1"
API = f"/apis/{GROUP}/{VERSION}"
NAMESPACE = NAME = "metrics-adapter"
REGISTRATIONS = "/apis/apiregistration.k8s.io/v1/apiservices"
CONTROLLER = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Answers for the one metric of the rule, about pods."""

    rule: Object
    api: Api
    prometheus: Prometheus

    @property
    def metric(self) -> str:
        return str(self.rule["name"]["as"])

    def answer(self, path: str) -> Object | None:
        """The answer to a GET, None where there is nothing."""
        url = urlsplit(path)
        if url.path.rstrip("/") == API:
            return self._resources()
        parts = unquote(url.path).removeprefix(API).strip("/").split("/")
        if len(parts) == 5 and parts[0] == "namespaces" and parts[2:] == ["pods", "*", self.metric]:
            (selector,) = parse_qs(url.query).get("labelSelector", [""])
            return self._values(parts[1], selector)
        return None

    def _resources(self) -> Object:
        resource = {"name": f"pods/{self.metric}", "singularName": "", "namespaced": True}
        resource |= {"kind": "MetricValueList", "verbs": ["get"]}
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": f"{GROUP}/{VERSION}",
            "resources": [resource],
        }

    def _values(self, namespace: str, selector: str) -> Object:
        pods = self.api.items("Pod", namespace, labelSelector=selector)
        names = "|".join(pod["metadata"]["name"] for pod in pods)
        query = self.rule["metricsQuery"]
        query = query.replace("<<.LabelMatchers>>", f'namespace="{namespace}",pod=~"{names}"')
        query = query.replace("<<.GroupBy>>", "pod")
        return {
            "kind": "MetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": [
                {
                    "describedObject": {"kind": "Pod", "namespace": namespace, "name": pod},
                    "metric": {"name": self.metric},
                    "timestamp": at,
                    "value": f"{round(1000 * value)}m",
                }
                for pod, value, at in self.prometheus.by_pod(query)
            ],
        }


@contextmanager
def serving_metrics(adapter: Adapter, folder: Path) -> Iterator[None]:
    """The adapter is the cluster's metrics API while the block runs."""
    pair = make_pair(folder, "adapter")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = adapter.answer(self.path)
            content = json.dumps(body or {"kind": "Status", "apiVersion": "v1"}).encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer((ADDRESS, 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    created = _objects(server.server_port)
    try:
        for path, body in created:
            adapter.api.call("POST", path, body)
        yield
    finally:
        for path, body in reversed(created):
            adapter.api.call("DELETE", f"{path}/{body['metadata']['name']}")
        server.shutdown()
        server.server_close()


def _objects(port: int) -> list[tuple[str, Object]]:
    """What makes the API server send the group's requests to the port, and the HPA controller may
    read, each with the path of its collection.
    """
    core, rbac = "/api/v1/namespaces", "/apis/rbac.authorization.k8s.io/v1"
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
    meta = {"name": NAME}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAME}
    return [
        (core, {"metadata": meta}),
        (f"{core}/{NAMESPACE}/services", {"metadata": meta, "spec": {"ports": [{"port": 443}]}}),
        (
            slices,
            {
                "metadata": {**meta, "labels": {"kubernetes.io/service-name": NAME}},
                "addressType": "IPv4",
                "ports": [{"name": "", "port": port}],
                "endpoints": [{"addresses": [ADDRESS], "conditions": {"ready": True}}],
            },
        ),
        (
            f"{rbac}/clusterroles",
            {
                "metadata": meta,
                "rules": [{"apiGroups": [GROUP], "resources": ["*"], "verbs": ["*"]}],
            },
        ),
        (
            f"{rbac}/clusterrolebindings",
            {
                "metadata": meta,
                "roleRef": role,
                "subjects": [{"kind": "User", "name": CONTROLLER}],
            },
        ),
        (
            REGISTRATIONS,
            {
                "metadata": {"name": f"{VERSION}.{GROUP}"},
                "spec": {
                    "group": GROUP,
                    "version": VERSION,
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                    "insecureSkipTLSVerify": True,
                    "service": {"namespace": NAMESPACE, "name": NAME, "port": 443},
                },
            },
        ),
    ]
