"""A real Prometheus on the node that finds the runtime's pods by itself and answers queries."""

import json
import re
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
import yaml

from cluster.harness.apiclient import Api, Object
from cluster.harness.controlplane import ControlPlane, free_ports
from e2e.harness.installation import NAMESPACE

PROGRAM = Path("/usr/bin/prometheus")
NAME_LABEL = "serving.fairlead.dev/name"


@dataclass(slots=True)
class Prometheus:
    """Scrapes what the example's PodMonitor selects, with the labels that it gives."""

    plane: ControlPlane
    api: Api
    port: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)
    _discovery: threading.Thread = field(init=False)

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
        self._discovery = threading.Thread(target=self._discover, daemon=True)
        self._discovery.start()

    def stop(self) -> None:
        self._stopped.set()
        self._discovery.join()
        self.plane.remove("prometheus")

    def value(self, query: str) -> float | None:
        """The only series of an instant query, or None while there is none."""
        series = self._series(query)
        assert len(series) <= 1, series
        return float(series[0]["value"][1]) if series else None

    def by_pod(self, query: str) -> list[tuple[str, float, str]]:
        """The pod, value and time (RFC 3339) of each series of an instant query."""
        return [
            (
                each["metric"]["pod"],
                float(each["value"][1]),
                datetime.fromtimestamp(each["value"][0], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            )
            for each in self._series(query)
        ]

    def _series(self, query: str) -> list[Object]:
        """Empty while Prometheus starts."""
        try:
            answer = httpx.get(
                f"http://127.0.0.1:{self.port}/api/v1/query",
                params={"query": query, "time": str(time.time())},
                timeout=10,
            )
        except httpx.TransportError:
            return []
        if (
            answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
        ):  # its port is open before it reads
            return []
        body = answer.json()
        assert body["status"] == "success", body
        series: list[Object] = body["data"]["result"]
        return series

    def _configuration(self) -> dict[str, object]:
        """What the Prometheus operator writes for the PodMonitor of the examples, but for the
        discovery: Debian's Prometheus is built without Kubernetes', so ``_discover`` does it.
        """
        found = {"files": [str(self._targets)], "refresh_interval": "1s"}
        return {
            "scrape_configs": [
                {"job_name": "fairlead", "scrape_interval": "1s", "file_sd_configs": [found]}
            ]
        }

    @property
    def _targets(self) -> Path:
        return self.plane.home / "prometheus-targets.json"

    def _discover(self) -> None:
        """Write the pods that are there now, until ``stop``, with the labels that the PodMonitor
        gives.
        """
        while not self._stopped.wait(0.5):
            pods = self.api.items("Pod", NAMESPACE, labelSelector=NAME_LABEL)
            targets = [
                {
                    "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
                    "labels": {
                        "namespace": NAMESPACE,
                        "pod": pod["metadata"]["name"],
                        re.sub(r"\W", "_", NAME_LABEL): pod["metadata"]["labels"][NAME_LABEL],
                    },
                }
                for pod in pods
                if pod["status"].get("podIP")
                for container in pod["spec"]["containers"]
                for port in container.get("ports") or ()
                if port["name"] == "admin"
            ]
            written = self._targets.with_suffix(".new")
            written.write_text(json.dumps(targets))
            written.replace(self._targets)
