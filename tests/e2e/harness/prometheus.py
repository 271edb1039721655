"""A real Prometheus on the node that finds the runtime's pods by itself and answers queries."""

import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from cluster.harness.controlplane import ControlPlane, free_ports
from e2e.harness.installation import NAMESPACE

PROGRAM = Path("/usr/bin/prometheus")
NAME_LABEL = "serving_fairlead_dev_name"


@dataclass(slots=True)
class Prometheus:
    """Scrapes what the example's PodMonitor selects, with the labels that it gives."""

    plane: ControlPlane
    port: int = 0

    def start(self) -> None:
        self.port = free_ports(1)[0]
        config = self.plane.home / "prometheus.yaml"
        config.write_text(yaml.safe_dump(self._configuration()))
        self.plane.spawn(
            "prometheus",
            [
                f"--config.file={config}",
                f"--storage.tsdb.path={self.plane.home / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            PROGRAM,
        )

    def value(self, query: str) -> float | None:
        """The only series of an instant query, or None while there is none."""
        try:
            answer = httpx.get(
                f"http://127.0.0.1:{self.port}/api/v1/query",
                params={"query": query, "time": str(time.time())},
                timeout=10,
            )
        except httpx.TransportError:
            return None
        body = answer.json()
        assert body["status"] == "success", body
        series = body["data"]["result"]
        assert len(series) <= 1, series
        return float(series[0]["value"][1]) if series else None

    def _configuration(self) -> dict[str, object]:
        """What the Prometheus operator writes for the PodMonitor of the examples."""
        token = self.plane.home / "prometheus-token"
        token.write_text(self.plane.tokens["admin"])
        found = "__meta_kubernetes"
        relabel = [
            {
                "source_labels": [f"{found}_pod_labelpresent_{NAME_LABEL}"],
                "regex": "true",
                "action": "keep",
            },
            {
                "source_labels": [f"{found}_pod_container_port_name"],
                "regex": "admin",
                "action": "keep",
            },
            {"source_labels": [f"{found}_namespace"], "target_label": "namespace"},
            {"source_labels": [f"{found}_pod_name"], "target_label": "pod"},
            {"source_labels": [f"{found}_pod_label_{NAME_LABEL}"], "target_label": NAME_LABEL},
        ]
        discovery = {
            "role": "pod",
            "api_server": self.plane.url,
            "authorization": {"credentials_file": str(token)},
            "tls_config": {"ca_file": str(self.plane.ca)},
            "namespaces": {"names": [NAMESPACE]},
        }
        return {
            "scrape_configs": [
                {
                    "job_name": "fairlead",
                    "scrape_interval": "1s",
                    "kubernetes_sd_configs": [discovery],
                    "relabel_configs": relabel,
                }
            ]
        }
