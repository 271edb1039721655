"""Load from a client pod: the pod, and the loads that a test starts and stops in it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from cluster.harness.apiclient import Api, Object, eventually
from support.full import LONG_FORM

PROGRAM = Path(__file__).with_name("client.py")
PORT = 8090
_numbers = count(1)
# Between two requests of a worker, in seconds. Senders that never rest leave no time to the pods
# that start beside them.
PAUSE = 0.5 if LONG_FORM else 1.0


@dataclass(slots=True)
class Report:
    """What the clients of one load saw; times are seconds of the client pod's clock.

    ``answered`` counts whole answers, ``streams`` whole streams, ``busy`` answers of 429.
    """

    seconds: float = 0
    answered: int = 0
    streams: int = 0
    busy: int = 0
    failed: list[Object] = field(default_factory=list)
    cut: list[Object] = field(default_factory=list)
    open: int = 0
    median: float | None = None
    p99: float | None = None
    longest_gap: float | None = None

    def assert_nothing_lost(self) -> None:
        """Every request had its whole answer, and there were some."""
        assert not self.failed, f"{len(self.failed)} failed: {_by_cause(self.failed)}"
        assert not self.cut, f"{len(self.cut)} were cut: {_by_cause(self.cut)}"
        assert self.answered or self.streams, "the clients had no answer at all"


def _by_cause(losses: list[Object]) -> str:
    """How often each cause came, with the longest and the last of them."""
    kinds = Counter(f"{loss['kind']}: {loss['what']}" for loss in losses)
    longest = max(losses, key=lambda loss: float(loss["at"] - loss["began"]))
    return f"{kinds.most_common(8)}; the longest was {longest}; the last was {losses[-1]}"


@dataclass(slots=True)
class Client:
    """The client pod in a namespace of its own."""

    api: Api
    namespace: str
    image: str
    address: str = ""
    http: httpx.Client = field(default_factory=partial(httpx.Client, timeout=400))

    def start(self) -> None:
        """Create the pod; returns when it takes orders."""
        meta = {"name": "client", "namespace": self.namespace}
        self.api.create(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": meta,
                "data": {"client.py": PROGRAM.read_text()},
            }
        )
        self.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": self._pod()})
        self.address = eventually(self._running_at, 60, "the client pod runs")
        eventually(self._answers, 30, "the client takes orders")

    @contextmanager
    def load(
        self,
        service: str,
        *,
        model: str,
        new_per_second: float = 0,
        kept: int = 0,
        streams: int = 0,
        tokens: int = 8,
        stream_tokens: int = 200,
        pause: float = PAUSE,
    ) -> Iterator["Load"]:
        """Requests to a Service's DNS name while the block runs; ``Load.report`` is complete after
        it.

        ``new_per_second`` requests on new connections, ``kept`` workers with a connection each and
        ``streams`` workers that stream; a worker pauses between two requests.
        """
        name = f"load-{next(_numbers)}"
        wanted = {
            "name": name,
            "url": f"http://{service}.svc.cluster.local/v1/completions",
            "model": model,
            "new_per_second": new_per_second,
            "kept": kept,
            "streams": streams,
            "tokens": tokens,
            "stream_tokens": stream_tokens,
            "pause": pause,
        }
        self.ask("POST", "start", wanted)
        load = Load(self, name)
        try:
            yield load
        finally:
            load.report = Report(**self.ask("POST", f"{name}/stop"))

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        url = f"http://{self.address}:{PORT}/{path}"
        answer = self.http.request(method, url, json=body)
        answer.raise_for_status()
        return answer.json()

    def _pod(self) -> Object:
        return {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "client",
                    "image": self.image,
                    "imagePullPolicy": "Never",
                    "command": ["python", "/program/client.py"],
                    # Else the pods that it loads leave it no time on a busy node.
                    "resources": {"requests": {"cpu": "200m"}},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                    },
                    "volumeMounts": [{"name": "program", "mountPath": "/program"}],
                }
            ],
            "volumes": [{"name": "program", "configMap": {"name": "client"}}],
        }

    def _running_at(self) -> str:
        status = self.api.get("Pod", self.namespace, "client").get("status") or {}
        return str(status.get("podIP", "")) if status.get("phase") == "Running" else ""

    def _answers(self) -> bool:
        try:
            self.ask("GET", "")
        except httpx.HTTPError:
            return False
        return True


@dataclass(slots=True)
class Load:
    """A running load."""

    client: Client
    name: str
    report: Report = field(default_factory=Report)

    def look(self) -> Report:
        """What the clients have seen so far."""
        return Report(**self.client.ask("GET", self.name))

    def await_more(self, answers: int, streams: int = 0, within: float = 300) -> Report:
        """Returns once so many more whole answers and streams have come."""
        before = self.look()

        def enough() -> Report | None:
            now = self.look()
            more = (now.answered - before.answered, now.streams - before.streams)
            return now if more[0] >= answers and more[1] >= streams else None

        return eventually(
            enough, within, f"{answers} more answers and {streams} streams", every=0.2
        )
