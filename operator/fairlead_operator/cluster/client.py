"""The only module that talks to the API server, except for kopf's watches. Plain dicts in and out.

Owns pacing, deadlines and the fence: nothing is written unless this process holds the Lease. Never
retries; the caller's queue does.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from fairlead_operator.cluster.cache import Store, trim
from fairlead_operator.errors import ApiError, FencedError
from fairlead_operator.metrics import Metrics
from fairlead_operator.resource.json_text import json_value
from fairlead_operator.resource.kinds import (
    MANAGER,
    RESOURCE,
    Key,
    Kind,
    Object,
    key_of,
    version_of,
)
from fairlead_operator.resource.settings import SettingsError

REQUEST_SECONDS = 10.0
FENCED = frozenset({"apply", "create", "delete", "status", "event"})  # verbs that need the Lease
PAGE, METADATA_PAGE = 250, 1000  # objects in one answer
JSON = "application/json"
METADATA = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
_NOT_IN_SCHEMA = "field not declared in schema"
# Held by a resourceVersion, server-side apply creates and never patches: no object has version 1.
_MUST_NOT_EXIST = "1"


class Pace:
    """A token bucket: ``rate`` requests a second, ``burst`` at once."""

    def __init__(
        self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._last = float(burst), clock()

    async def take(self) -> None:
        """Wait for the next turn; turns come in order."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._last) * self._rate)
        self._last = now
        self._tokens -= 1
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._rate)


async def api_client(environ: Mapping[str, str] = os.environ) -> ApiClient:
    """A client from KUBECONFIG, else from the pod's service account. Raises SettingsError."""
    configuration, file = Configuration(), environ.get("KUBECONFIG")
    try:
        if file:
            await load_kube_config(  # type: ignore[no-untyped-call]
                file, client_configuration=configuration
            )
        else:
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - that library raises what its parsers raise
        if file:
            reason = " ".join(str(error).split())[:300]
            raise SettingsError(
                f"KUBECONFIG: {file} cannot be used ({reason}): name a valid file"
            ) from None
        raise SettingsError(
            "KUBECONFIG is not set and the process runs in no pod: set it"
        ) from None
    # As kubectl: chain, dates and name are checked, RFC 5280's form is not. Clusters made before
    # Kubernetes 1.17 have certificates without an authority key identifier.
    configuration.disable_strict_ssl_verification = True
    return ApiClient(configuration)


class Cluster:
    """Reads, fenced writes, and the store that both keep current."""

    def __init__(
        self,
        client: ApiClient,
        store: Store,
        metrics: Metrics,
        pace: Pace | None = None,
    ) -> None:
        self.store = store
        self.may_write: Callable[[], bool] = lambda: (
            False
        )  # the composition root puts the Lease here
        self._client, self._metrics = client, metrics
        self._pace = pace or Pace(50, 100)

    async def list(self, kind: Kind, namespace: str = "") -> tuple[list[Object], int]:
        """All objects the operator looks at, trimmed, and the version of the list."""
        bodies: list[Object] = []
        version = 0
        async for items, at in self._pages(kind, namespace, PAGE, JSON):
            bodies += [trim(kind, body) for body in items]
            version = version or at
        return bodies, version

    async def versions(self, kind: Kind, namespace: str = "") -> tuple[dict[Key, int], int]:
        """The versions of the objects that ``list`` returns, from their metadata alone, and that
        of the list.
        """
        versions: dict[Key, int] = {}
        version = 0
        async for items, at in self._pages(kind, namespace, METADATA_PAGE, METADATA):
            versions |= {key_of(body): version_of(body) for body in items}
            version = version or at
        return versions, version

    async def list_one(self, kind: Kind, key: Key) -> Object | None:
        """One object as ``list`` returns it. It is asked for as a list of its name: of the objects
        that the operator only looks at, the chart grants no other right.
        """
        namespace, name = key
        async for items, _ in self._pages(kind, namespace, PAGE, JSON, f"metadata.name={name}"):
            for body in items:
                return trim(kind, body)
        return None

    async def _pages(
        self, kind: Kind, namespace: str, limit: int, accept: str, fields: str = ""
    ) -> AsyncIterator[tuple[Sequence[Object], int]]:
        """The pages of one list, all of the same version, and that version. ``fields`` selects in
        addition to the kind's own selectors.
        """
        field_selector = ",".join(selector for selector in (kind.fields, fields) if selector)
        selectors = {"labelSelector": kind.labels, "fieldSelector": field_selector}
        query = {name: text for name, text in selectors.items() if text} | {"limit": str(limit)}
        while True:
            answer = await self.call("list", "GET", kind.path(namespace), query, accept=accept)
            items, version = answer.get("items", ""), version_of(answer)
            items = [] if items is None else items  # as an empty list of metadata is written
            if not isinstance(items, list) or not version:
                raise ApiError(200, "BadAnswer", f"the answer for {kind.plural} is not a list")
            yield items, version
            if not (continue_token := answer["metadata"].get("continue")):
                return
            query["continue"] = continue_token

    async def get(self, kind: Kind, key: Key) -> Object | None:
        try:
            answer: Object = await self.call("get", "GET", kind.path(*key))
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        return answer

    async def apply(self, kind: Kind, manifest: Object, uid: str | None) -> Object:
        """Server-side apply as the one owner of our fields.

        ``uid`` None: the object must not exist (409 otherwise), so that nothing foreign is ever
        adopted; else it must be the object with that uid.
        """
        meta = manifest["metadata"]
        guard = {"uid": uid} if uid else {"resourceVersion": _MUST_NOT_EXIST}
        body = {**manifest, "metadata": {**meta, **guard}}
        query = {"fieldManager": MANAGER, "force": "true" if uid else "false"}
        path = kind.path(meta["namespace"], meta["name"])
        answer: Object = await self.call(
            "apply" if uid else "create", "PATCH", path, query, body, APPLY
        )
        self.store.put(kind, answer)
        return answer

    async def patch(self, kind: Kind, body: Object, operations: Sequence[Object]) -> None:
        """A JSON patch of exactly the version that was read."""
        meta = body["metadata"]
        precondition = {
            "op": "test",
            "path": "/metadata/resourceVersion",
            "value": meta["resourceVersion"],
        }
        path = kind.path(meta["namespace"], meta["name"])
        query = {"fieldManager": MANAGER}
        await self.call("apply", "PATCH", path, query, [precondition, *operations], JSON_PATCH)

    async def delete(self, kind: Kind, body: Object) -> None:
        """Delete exactly the version that was read; a changed object gives 409.

        The store drops it at once: a watch may not deliver the deletion, and nothing is deleted
        twice.
        """
        meta = body["metadata"]
        preconditions = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        options = {"preconditions": preconditions, "propagationPolicy": "Background"}
        try:
            await self.call(
                "delete", "DELETE", kind.path(meta["namespace"], meta["name"]), body=options
            )
        except ApiError as error:
            if error.code != 404:
                raise
        self.store.mark_deleted(kind, body)

    async def set_status(self, resource: Object, status: Object) -> None:
        """Replace the status of exactly the version that was read; a changed resource gives 409.

        Otherwise an operator that starts on an old list would lower ``observedGeneration``.
        """
        meta = resource["metadata"]
        body = {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.name,
            "metadata": {
                name: meta[name] for name in ("name", "namespace", "uid", "resourceVersion")
            },
            "status": status,
        }
        query = {"fieldManager": MANAGER, "force": "true"}
        path = RESOURCE.path(meta["namespace"], meta["name"], "status")
        try:
            answer = await self.call("status", "PATCH", path, query, body, APPLY)
        except ApiError as error:
            if _NOT_IN_SCHEMA not in error.message:
                raise
            # The CRD is older than this operator. Apply refuses a field that it lacks; a JSON
            # patch stores the others.
            operations = [
                {"op": "test", "path": f"/metadata/{name}", "value": meta[name]}
                for name in ("uid", "resourceVersion")
            ]
            operations.append({"op": "add", "path": "/status", "value": status})
            answer = await self.call(
                "status", "PATCH", path, {"fieldManager": MANAGER}, operations, JSON_PATCH
            )
        self.store.put(RESOURCE, answer)

    async def post_event(self, kind: Kind, event: Object) -> None:
        query = {"fieldManager": MANAGER}
        await self.call("event", "POST", kind.path(event["metadata"]["namespace"]), query, event)

    async def write_lease(self, kind: Kind, key: Key, lease: Object) -> Object:
        """Create or replace the Lease; the one write that needs no Lease."""
        answer: Object
        if lease["metadata"].get("resourceVersion"):
            answer = await self.call("lease", "PUT", kind.path(*key), body=lease)
        else:
            answer = await self.call("lease", "POST", kind.path(key[0]), body=lease)
        return answer

    async def call(
        self,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> Any:
        """One request within its deadline. Raises ApiError unless the answer is good JSON, and
        FencedError for a write without the Lease: waiting for the pace may take longer than it.
        """
        await self._pace.take()
        if verb in FENCED and not self.may_write():
            raise FencedError("this process does not hold the Lease")
        code = 0
        try:
            code, text, retry_after = await self._exchange(
                method, path, query, body, {"Content-Type": content_type, "Accept": accept}
            )
            answer = json_value(text)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiError(0, "NoAnswer", f"{type(error).__name__}: {error}") from error
        except ValueError as error:
            raise ApiError(
                code, "BadAnswer", f"the answer to {method} {path} is not JSON"
            ) from error
        finally:
            self._metrics.calls.labels(verb, str(code)).inc()
        if not isinstance(answer, dict):
            raise ApiError(code, "BadAnswer", f"the answer to {method} {path} is not a JSON object")
        if code >= 400:
            raise ApiError(
                code, str(answer.get("reason", "")), str(answer.get("message", "")), retry_after
            )
        return answer

    async def _exchange(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Any,
        headers: Mapping[str, str],
    ) -> tuple[int, bytes, float]:
        request = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params=dict(headers),
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._client.call_api(*request, _request_timeout=REQUEST_SECONDS)
        wish = answer.headers.get("Retry-After", "")
        text: bytes = await answer.read()  # type: ignore[no-untyped-call]
        return answer.status, text, min(float(wish), 10.0) if wish.isdigit() else 0.0


@contextlib.asynccontextmanager
async def connect(
    store: Store, metrics: Metrics, environ: Mapping[str, str] = os.environ
) -> AsyncIterator[Cluster]:
    """A cluster client that is closed at the end of the block. Raises SettingsError."""
    client = await api_client(environ)
    try:
        yield Cluster(client, store, metrics)
    finally:
        await client.close()  # type: ignore[no-untyped-call]
