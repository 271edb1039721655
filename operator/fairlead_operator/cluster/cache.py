"""The operator's latest view of the cluster, by kind and key.

Fed by watches, by the steady re-list and by the answers to our own writes. The newest version of an
object wins in any order of arrival, so a replayed list or a late event changes nothing. Uses no
network and decides nothing.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from fairlead_operator.memory import Memo
from fairlead_operator.resource.kinds import (
    EVENT,
    NAME_LABEL,
    POD,
    RESOURCE,
    Key,
    Kind,
    Object,
    controller_of,
    key_of,
    version_of,
)
from fairlead_operator.resource.resource import InferenceDeployment

K = TypeVar("K")

TOMBSTONE_SECONDS = 300.0
RESTORED_SECONDS = 60.0  # older lists for this long: etcd was restored from a backup
# What decisions read of a pod, of its containers and of their statuses; the rest of a thousand pods
# would be most of the operator's memory.
_POD_SPEC = ("priorityClassName",)
_CONTAINER = ("name", "resources")
_CONTAINER_STATUS = ("name", "state", "lastState", "ready", "started", "restartCount")


class Store:
    """Objects by kind and (namespace, name), with an index of children by the resource they belong
    to.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._objects: dict[str, dict[Key, Object]] = {}
        self._children: dict[str, dict[Key, set[Key]]] = {}
        self._about: dict[str, set[Key]] = {}  # events by the uid of their object
        self._graves: dict[str, dict[Key, tuple[int, float]]] = {}
        self._listed: dict[tuple[str, str], int] = {}  # the newest list's version
        self._complete: set[tuple[str, str]] = set()  # listed, and not forgotten since
        self._older_since: dict[tuple[str, str], float] = {}  # the first of several older lists
        self._resources: Memo[InferenceDeployment] = Memo(_parse)

    def get(self, kind: Kind, key: Key) -> Object | None:
        return self._objects.get(kind.name, {}).get(key)

    def resource(self, body: Object) -> InferenceDeployment:
        """A body of our kind as a value. Raises ResourceError."""
        meta = body["metadata"]
        identity = {name: meta.get(name) for name in ("name", "namespace", "uid", "generation")}
        return self._resources(key_of(body), {**body, "metadata": identity, "status": None})

    def all(self, kind: Kind) -> list[Object]:
        return list(self._objects.get(kind.name, {}).values())

    def children(self, kind: Kind, resource: Key) -> list[Object]:
        """Objects of a kind that carry the resource's name label, by name."""
        keys = self._children.get(kind.name, {}).get(resource, set())
        return [self._objects[kind.name][key] for key in sorted(keys)]

    def in_namespace(self, kind: Kind, namespace: str) -> list[Object]:
        return [
            body for key, body in self._objects.get(kind.name, {}).items() if key[0] == namespace
        ]

    def events_about(self, uids: Iterable[str]) -> list[Object]:
        """Events whose object has one of these uids."""
        keys = set().union(*(self._about.get(uid, set()) for uid in uids))
        return [self._objects[EVENT.name][key] for key in sorted(keys)]

    def pods_about(self, event: Object) -> list[tuple[Kind, Object]]:
        """The pod an event is about, if it is one of ours."""
        about = event.get("involvedObject") or {}
        body = self.get(POD, (about.get("namespace", ""), about.get("name", "")))
        return [(POD, body)] if body is not None and about.get("kind") == POD.name else []

    def put(self, kind: Kind, body: Object) -> bool:
        """Take a newer version of an object; False when it is not newer."""
        key, version = key_of(body), version_of(body)
        cached = self.get(kind, key)
        if cached is not None and version <= version_of(cached):
            return False
        grave = self._graves.get(kind.name, {}).get(key)
        if grave is not None and version < grave[0]:
            # The same version is taken: an object that only lost our label still exists.
            return False
        self._drop(kind, key)
        self._objects.setdefault(kind.name, {})[key] = trim(kind, body)
        if resource := resource_of(body):
            self._children.setdefault(kind.name, {}).setdefault(resource, set()).add(key)
        if kind is EVENT and (about := _about(body)):
            self._about.setdefault(about, set()).add(key)
        return True

    def now(self) -> float:
        """The time on the store's clock, in seconds."""
        return self._clock()

    def take(self, kind: Kind, body: Object, asked_at: float) -> bool:
        """Take an object that was read by its name, for which the API server was asked at
        ``asked_at``; False when it is not newer.

        It exists, whatever was buried before: a list shows only objects with our label, and one
        that lost it is buried at the version of the list, which is newer than its own.
        """
        graves = self._graves.get(kind.name, {})
        _, buried_at = graves.get(key_of(body), (0, asked_at))
        if buried_at < asked_at:
            del graves[key_of(body)]
        return self.put(kind, body)

    def remove(self, kind: Kind, body: Object) -> bool:
        """Take a deletion; False when the cached object is newer, or another of that name."""
        key, version = key_of(body), version_of(body)
        cached = self.get(kind, key)
        if cached is not None and version < version_of(cached):
            return False
        self._bury(kind, key, version)
        return cached is not None

    def mark_deleted(self, kind: Kind, body: Object) -> None:
        """Take the answer to our own deletion of this version: nothing up to it comes back from an
        old list.
        """
        cached = self.get(kind, key_of(body))
        if cached is None or version_of(cached) <= version_of(body):
            self._bury(kind, key_of(body), version_of(body) + 1)

    def has_list(self, kind: Kind, namespace: str) -> bool:
        """Whether a whole list of this kind was taken, and not forgotten since."""
        return (kind.name, namespace) in self._complete

    def stale_keys(
        self, kind: Kind, namespace: str, versions: Mapping[Key, int], version: int
    ) -> list[Key] | None:
        """Keys of the objects that a list of versions has newer than the store; None if the list is
        older than one taken before, and must be read whole.
        """
        if version < self._listed[kind.name, namespace]:
            return None
        objects = self._objects.get(kind.name, {})
        return [
            key
            for key, listed_version in versions.items()
            if key not in objects or version_of(objects[key]) < listed_version
        ]

    def replace(
        self, kind: Kind, namespace: str, bodies: Iterable[Object], version: int
    ) -> list[Object]:
        """Take a whole list of one namespace ("": all); returns the objects that changed or went.

        A list older than one taken before is dropped; objects newer than the list stay. When all
        lists are older for RESTORED_SECONDS, versions went back, and the list replaces everything.
        """
        scope = (kind.name, namespace)
        changed: list[Object] = []
        if version < self._listed.get(scope, 0):
            now = self._clock()
            if now - self._older_since.setdefault(scope, now) < RESTORED_SECONDS:
                return []
            changed = self._forget_newer(kind, namespace, version)
        self._older_since.pop(scope, None)
        self._listed[scope] = version
        self._complete.add(scope)
        listed_keys: set[Key] = set()
        for body in bodies:
            listed_keys.add(key_of(body))
            if self.put(kind, body):
                changed.append(body)
        for key, cached in list(self._objects.get(kind.name, {}).items()):
            inside = not namespace or key[0] == namespace
            if inside and key not in listed_keys and version_of(cached) <= version:
                self._bury(kind, key, version)
                changed.append(cached)
        self._sweep(kind)
        return changed

    def keep_only(self, kinds: Iterable[Kind], namespaces: Collection[str]) -> None:
        """Forget the objects of these kinds outside these namespaces. The versions of their lists
        are kept: an older list is not taken later.
        """
        names = {kind.name for kind in kinds}
        self._complete = {s for s in self._complete if s[0] not in names or s[1] in namespaces}
        for kind in kinds:
            for key in list(self._objects.get(kind.name, {})):
                if key[0] not in namespaces:
                    self._drop(kind, key)
            self._sweep(kind)  # where no list comes that would do it

    def _forget_newer(self, kind: Kind, namespace: str, version: int) -> list[Object]:
        """Drop what is newer than ``version``, and every grave; returns the objects dropped."""
        objects = self._objects.get(kind.name, {})
        newer = [
            body
            for key, body in objects.items()
            if (not namespace or key[0] == namespace) and version_of(body) > version
        ]
        for body in newer:
            self._drop(kind, key_of(body))
        self._graves.pop(kind.name, None)
        return newer

    def _bury(self, kind: Kind, key: Key, version: int) -> None:
        self._drop(kind, key)
        if kind is RESOURCE:
            self._resources.forget(key)
        self._graves.setdefault(kind.name, {})[key] = (version, self._clock())

    def _drop(self, kind: Kind, key: Key) -> None:
        body = self._objects.get(kind.name, {}).pop(key, None)
        if body is None:
            return
        if resource := resource_of(body):
            _discard(self._children[kind.name], resource, key)
        if kind is EVENT and (about := _about(body)):
            _discard(self._about, about, key)

    def _sweep(self, kind: Kind) -> None:
        graves, now = self._graves.get(kind.name, {}), self._clock()
        for key in [key for key, (_, buried) in graves.items() if now - buried > TOMBSTONE_SECONDS]:
            del graves[key]


def resource_of(body: Object) -> Key | None:
    """The resource an object belongs to: its controller's, or the label's on what other controllers
    create for it.
    """
    meta = body["metadata"]
    controller = controller_of(body)
    is_owned = controller is not None and controller.get("kind") == RESOURCE.name
    name = (
        controller["name"]
        if controller and is_owned
        else (meta.get("labels") or {}).get(NAME_LABEL)
    )
    return (meta.get("namespace", ""), name) if name else None


def _parse(body: Object) -> InferenceDeployment:
    return InferenceDeployment.from_body(body, stored=True)


def _about(event: Object) -> str:
    return str((event.get("involvedObject") or {}).get("uid") or "")


def _discard(index: dict[K, set[Key]], entry: K, key: Key) -> None:
    index[entry].discard(key)
    if not index[entry]:
        del index[entry]


def trim(kind: Kind, body: Object) -> Object:
    """A copy without the fields that no decision reads, and with the kind that items of a list
    lack.

    ``managedFields``, often the larger half of an object, keeps the managers that applied it.
    """
    slim = {**body, "kind": kind.name, "apiVersion": kind.api_version}
    slim["metadata"] = {k: v for k, v in body["metadata"].items() if k != "managedFields"}
    if kind is not POD:
        managers = [
            {name: entry[name] for name in ("manager", "operation")}
            for entry in body["metadata"].get("managedFields") or ()
            if entry.get("operation") == "Apply"
        ]
        slim["metadata"] |= {"managedFields": managers} if managers else {}
    if kind.name == "Pod":
        spec, status = body.get("spec") or {}, body.get("status") or {}
        (slim["spec"],) = _only([spec], _POD_SPEC)
        slim["spec"] |= {"containers": _only(spec.get("containers"), _CONTAINER)}
        slim["status"] = status | {
            name: _only(status[name], _CONTAINER_STATUS)
            for name in ("initContainerStatuses", "containerStatuses")
            if name in status
        }
    interned: Object = _intern(slim)
    return interned


def _intern(value: Any) -> Any:
    """A copy of JSON with each text once in memory: objects of one kind have the same keys, and
    those of one resource the same names and labels. It halves the memory of a fleet.
    """
    if isinstance(value, dict):
        return {sys.intern(key): _intern(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_intern(item) for item in value]
    return sys.intern(value) if type(value) is str else value


def _only(items: Iterable[Mapping[str, Any]] | None, names: Iterable[str]) -> list[Object]:
    return [{name: item[name] for name in names if name in item} for item in items or ()]
