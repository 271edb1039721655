"""One InferenceDeployment on the node: applied, watched, changed and removed."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.harness.apiclient import ApiError, Object, eventually
from cluster.harness.resources import CHILDREN, KIND, condition, idep, status
from e2e.harness.installation import NAMESPACE, Installation

T = TypeVar("T")
# Several of these run beside each other on two cores.
SMALL: Object = {
    "resources": {
        "accelerator": {"count": 0},
        "cpu": "300m",
        "memory": "2Gi",
        "sharedMemory": "64Mi",
    },
    "scheduler": {"maxBatchTokens": 256, "maxRequests": 16},
    "cache": {"numBlocks": 1024},
}


@contextmanager
def serving(installation: Installation, name: str, **spec: Any) -> Iterator["Served"]:
    """A resource that is rolled out when the block begins, and gone after it; whatever its pods
    still do then is nobody's.
    """
    served = Served(installation, name)
    try:
        served.apply(**spec)
        served.until_rolled_out()
        yield served
    finally:
        served.delete(drained=False)


@dataclass(slots=True)
class Served:
    """A resource in the release's namespace."""

    installation: Installation
    name: str
    spec: Object = field(default_factory=dict)

    @property
    def service(self) -> str:
        """The Service's DNS name, as far as it depends on this resource."""
        return f"{self.name}.{NAMESPACE}"

    @property
    def label(self) -> str:
        """By which everything of it is found."""
        return f"serving.fairlead.dev/name={self.name}"

    @property
    def status(self) -> Object:
        return status(self.installation.api, NAMESPACE, self.name)

    def apply(self, **changes: Any) -> None:
        """Create the resource, or change it; it keeps what earlier changes said."""
        self.spec = {**self.spec, **changes}
        self.installation.api.apply(idep(NAMESPACE, self.name, **self.spec), force="true")

    def until_ready(self, within: float = 400) -> Object:
        """The status once Ready is true and about the newest spec."""

        return self._eventually(self._ready, within, "is Ready")

    def until_rolled_out(self, within: float = 400) -> Object:
        """The status once every wanted pod is of the newest revision, ready and among the Service's
        endpoints, and no other exists.
        """
        api = self.installation.api

        def look() -> Object | None:
            if not (seen := self._ready()):
                return None
            live = api.get("Deployment", NAMESPACE, self.name)
            state, wanted = live["status"], live["spec"]["replicas"]
            whole = state.get("observedGeneration") == live["metadata"]["generation"] and all(
                state.get(count, 0) == wanted
                for count in ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
            )
            exact = whole and len(self.pods()) == wanted == len(self.endpoints())
            return seen if exact else None

        return self._eventually(look, within, "is rolled out")

    def _ready(self) -> Object | None:
        """The status if Ready is true and about the newest spec."""
        body = self.installation.api.get(KIND, NAMESPACE, self.name)
        seen: Object = body.get("status") or {}
        about_this = seen.get("observedGeneration") == body["metadata"]["generation"]
        is_ready = condition(seen, "Ready").get("status") == "True"
        return seen if about_this and is_ready else None

    def pods(self) -> list[Object]:
        """Its pods, those that end too."""
        return self.installation.api.items("Pod", NAMESPACE, labelSelector=self.label)

    def names(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.pods()}

    def endpoints(self) -> set[str]:
        """The addresses to which the Service sends new connections."""
        label = f"kubernetes.io/service-name={self.name}"
        slices = self.installation.api.items("EndpointSlice", NAMESPACE, labelSelector=label)
        return {
            address
            for body in slices
            for endpoint in body.get("endpoints") or ()
            if endpoint["conditions"].get("ready")
            for address in endpoint["addresses"]
        }

    @property
    def told(self) -> str:
        """What `kubectl get` shows as reason, and the blockers."""
        seen = self.status
        blockers = [f"{b['code']}: {b['message']}" for b in seen.get("blockers") or ()]
        return f"{condition(seen, 'Ready').get('reason')} {blockers}"

    def until_blocked_by(self, code: str, within: float) -> Object:
        """The blocker of this code, once `kubectl get` shows it."""

        def look() -> Object | None:
            seen = self.status
            found = [b for b in seen.get("blockers") or () if b["code"] == code]
            return found[0] if found else None

        return self._eventually(look, within, f"has the blocker {code}")

    def _eventually(self, look: Callable[[], T | None], within: float, what: str) -> T:
        """As ``eventually``; a failure shows what the resource told at the end."""
        try:
            return eventually(look, within, f"{self.name} {what}", every=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {self.told}") from None

    def delete(self, *, drained: bool = True) -> None:
        """Returns when the resource, its children and its pods are gone; the pods have a second to
        end in if they need not be ``drained``.
        """
        api = self.installation.api
        if api.find(KIND, NAMESPACE, self.name):
            api.delete(KIND, NAMESPACE, self.name)

        def gone() -> bool:
            pods = self.pods()
            for meta in (pod["metadata"] for pod in pods if not drained):
                if meta.get("deletionGracePeriodSeconds", 0) > 1:
                    with contextlib.suppress(ApiError):  # it is gone by now
                        api.delete("Pod", NAMESPACE, meta["name"], gracePeriodSeconds="1")
            return not pods and not any(api.find(kind, NAMESPACE, self.name) for kind in CHILDREN)

        eventually(gone, 60, f"{self.name} and everything of it is gone")
