"""An API server in memory: enough of get, list, server-side apply, status and delete to run the
operator's reconcile on it, thousands of times a second and without a thread.

What it does not know raises. The real API server's word is what ``tests/cluster`` asks for.
"""

import asyncio
import copy
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from fairlead_operator.cluster.cache import Store
from fairlead_operator.cluster.client import Cluster
from fairlead_operator.errors import ApiError
from fairlead_operator.metrics import Metrics
from fairlead_operator.resource.kinds import BY_NAME, EVENT, Kind, Object, key_of

Name = tuple[str, str, str]  # plural, namespace, name
_NAME_SELECTOR = re.compile(r"metadata\.name=([^,]+)")
_PATH = re.compile(
    r"/apis?/(?:[^/]+/)?v[^/]+(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>status))?"
)
KINDS: Mapping[str, Kind] = {kind.plural: kind for kind in BY_NAME.values()}


class FakeApiServer:
    """Objects by plural, namespace and name, each with a version that only grows."""

    def __init__(self) -> None:
        self.objects: dict[Name, Object] = {}
        self.writes: list[tuple[str, Name]] = []  # verb and name of every write that was answered
        self.events: list[Object] = []  # told by the operator; they are not stored
        self.page = 1000  # objects of a list in one answer
        # Called with verb and name before a request is answered; an ApiError that it raises is the
        # answer. A list of metadata has the verb "versions".
        self.on_request: Callable[[str, Name], None] = lambda *_: None
        self._log: list[tuple[bool, Object]] = []  # deleted, object: what a watch would tell
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)

    def put(self, body: Object) -> Object:
        """Create or replace an object as somebody else would; its spec's generation follows."""
        kind = BY_NAME[body["kind"]]
        name = (kind.plural, *key_of(body))
        old = self.objects.get(name)
        new = copy.deepcopy(body)
        meta = new["metadata"]
        meta["resourceVersion"] = str(next(self._versions))
        meta.setdefault("uid", old["metadata"]["uid"] if old else f"uid-{next(self._uids)}")
        before = 0 if old is None else int(old["metadata"].get("generation", 1))
        changed = old is None or old.get("spec") != new.get("spec")
        meta["generation"] = before + changed
        self.objects[name] = new
        self._log.append((False, new))
        return new

    def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self.objects.get((kind.plural, namespace, name))

    def all(self, kind: Kind) -> list[Object]:
        return [
            body for (plural, *_), body in sorted(self.objects.items()) if plural == kind.plural
        ]

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        self._drop((kind.plural, namespace, name))

    def _drop(self, name: Name) -> None:
        gone = self.objects.pop(name)
        meta = {**gone["metadata"], "resourceVersion": str(next(self._versions))}
        self._log.append((True, {**gone, "metadata": meta}))

    @property
    def version(self) -> int:
        return next(self._versions)

    def sync(self, store: Store, since: int) -> int:
        """What watches do: tell the store what happened ``since``; returns up to where."""
        if not since:
            for kind in BY_NAME.values():
                store.replace(kind, "", copy.deepcopy(self.all(kind)), self.version)
            return len(self._log)
        for deleted, body in self._log[since:]:
            tell = store.remove if deleted else store.put
            tell(BY_NAME[body["kind"]], copy.deepcopy(body))
        return len(self._log)

    def answer(
        self, method: str, path: str, body: Any, query: Mapping[str, str], accept: str
    ) -> Object:
        match = _PATH.fullmatch(path)
        if match is None:
            raise AssertionError(f"the fake API server does not know {path}")
        plural, namespace = match["plural"], match["namespace"] or ""
        name = (plural, namespace, match["name"] or "")
        if method == "GET" and not match["name"]:
            metadata_only = "PartialObjectMetadataList" in accept
            only = _NAME_SELECTOR.search(query.get("fieldSelector", ""))
            name = (plural, namespace, only[1] if only else "")
            self.on_request("versions" if metadata_only else "list", name)
            return self._list(KINDS[plural], namespace, name[2], query, metadata_only=metadata_only)
        self.on_request(method.lower(), name)
        if method == "POST" and plural == EVENT.plural:
            self.events.append(body)
            return {}
        held = self.objects.get(name)
        if method == "GET":
            if held is None:
                raise ApiError(404, "NotFound", f"{name} not found")
            return copy.deepcopy(held)
        if method == "PATCH":
            made = self._apply(name, held, body, status=bool(match["sub"]))
            self.writes.append(("status" if match["sub"] else "apply", name))
            return copy.deepcopy(made)
        if method == "DELETE":
            if held is None:
                raise ApiError(404, "NotFound", f"{name} not found")
            self._drop(name)
            self.writes.append(("delete", name))
            return {}
        raise AssertionError(f"the fake API server does not know {method} {path}")

    def _list(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        query: Mapping[str, str],
        *,
        metadata_only: bool,
    ) -> Object:
        bodies = [
            body
            for body in self.all(kind)
            if namespace in {"", body["metadata"].get("namespace")}
            and name in {"", body["metadata"]["name"]}
        ]
        start = int(query.get("continue", 0))
        end = start + min(self.page, int(query.get("limit", self.page)))
        more = {"continue": str(end)} if bodies[end:] else {}
        page = copy.deepcopy(bodies[start:end])
        if metadata_only:
            page = [{"metadata": body["metadata"]} for body in page]
        return {"items": page, "metadata": {"resourceVersion": str(self.version), **more}}

    def _apply(self, name: Name, held: Object | None, body: Any, *, status: bool) -> Object:
        meta = body["metadata"]
        if held is None:
            if meta.get("uid"):
                raise ApiError(409, "Conflict", "the object is gone")
            return self.put({**body, "metadata": _clean(meta)})
        if meta.get("uid") != held["metadata"]["uid"]:
            raise ApiError(409, "Conflict", f"{name} exists with another uid")
        version = meta.get("resourceVersion")
        if version and version != held["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", f"{name} was changed")
        if status:
            return self.put({**held, "status": body["status"]})
        merged = {**held["metadata"], **_clean(meta), "uid": held["metadata"]["uid"]}
        merged["annotations"] = meta.get("annotations") or {}
        return self.put({**held, "spec": copy.deepcopy(body["spec"]), "metadata": merged})


def _clean(meta: Mapping[str, Any]) -> Object:
    return {key: value for key, value in meta.items() if key not in {"uid", "resourceVersion"}}


class FakeCluster(Cluster):
    """The operator's client on a FakeApiServer; every call yields once, as a real one would."""

    def __init__(self, server: FakeApiServer, store: Store) -> None:
        super().__init__(None, store, Metrics())  # type: ignore[arg-type]  # it makes no connection
        self.may_write = lambda: True
        self._server = server

    async def call(
        self,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Any:
        await asyncio.sleep(0)
        return self._server.answer(method, path, body, query or {}, accept)
