"""The writes of one pass, with their reasons: desired and observed objects in, Writes out. Pure;
writes nothing.

The comparison follows the API server's own merge rules: an object that holds everything we render
needs no write, whatever others added to it. Exceptions are fields that are one value as a whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairlead_operator.resource.fields import Quantity
from fairlead_operator.resource.kinds import (
    MANAGED_LABEL,
    MANAGED_VALUE,
    MANAGER,
    UID_LABEL,
    Object,
    controller_of,
)

# Lists that merge by key, as declared in the API types; every other list is one value.
_MERGE_KEYS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "containers": (("name",),),
    "initContainers": (("name",),),
    "env": (("name",),),
    "volumes": (("name",),),
    "volumeMounts": (("mountPath",),),
    "imagePullSecrets": (("name",),),
    "ownerReferences": (("uid",),),
    "ports": (("containerPort", "protocol"), ("port", "protocol")),
    "topologySpreadConstraints": (("topologyKey", "whenUnsatisfiable"),),
}
# Maps that are one value: an added key changes their meaning.
_WHOLE_MAPS = frozenset({"selector", "podSelector", "namespaceSelector", "labelSelector"})
# Maps whose empty values the server keeps; it drops empty fields.
_TEXT_MAPS = frozenset({"annotations", "labels", "matchLabels", "nodeSelector"})
# Almost all of a claim is immutable. Its data outlives every change of the spec: the garbage
# collector deletes it with its resource, and nothing deletes it earlier.
_WRITE_ONCE = frozenset({"PersistentVolumeClaim"})
_QUANTITY_PARENTS = frozenset({"limits", "requests"})
_QUANTITY_FIELDS = frozenset({"sizeLimit", "storage"})
# Flags that the server does not store while they are false; it stores every other one of ours.
_DROPPED_FLAGS = frozenset({"readOnly"})


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of one manifest. ``uid`` is the existing object's; None: none may exist.

    ``first`` is a JSON patch to send before. To the server, a list item with a changed merge key is
    not ours; if it kept our item's name, the server refuses the apply until the name is free.
    """

    manifest: Object
    uid: str | None
    reason: str
    first: tuple[Object, ...] = ()


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletion of exactly this object: its uid and resourceVersion are preconditions."""

    body: Object
    reason: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """An object with the name of one of ours that is not ours. It is left alone."""

    kind: str
    name: str
    owner: str


@dataclass(frozen=True, slots=True)
class Writes:
    """The writes of one pass besides the status, and the objects that it leaves alone."""

    apply: tuple[Apply, ...] = ()
    delete: tuple[Delete, ...] = ()
    conflicts: tuple[Conflict, ...] = ()


def diff(desired: Iterable[Object], observed: Iterable[Object], uid: str) -> Writes:
    """The writes that turn ``observed`` children into ``desired`` ones. ``uid`` is the resource's.

    An observed object that is not ours is a conflict if it has a desired name, and is ignored
    otherwise. An object that is being deleted gets no write until it is gone.
    """
    live = {(body["kind"], body["metadata"]["name"]): body for body in observed}
    applies: list[Apply] = []
    conflicts: list[Conflict] = []
    desired_identities = set()
    for manifest in desired:
        identity = (manifest["kind"], manifest["metadata"]["name"])
        desired_identities.add(identity)
        body = live.get(identity)
        if body is None:
            applies.append(Apply(manifest, None, "missing"))
        elif not is_owned(body, uid):
            conflicts.append(Conflict(*identity, owner=owner_text(body)))
        elif body["kind"] not in _WRITE_ONCE and not body["metadata"].get("deletionTimestamp"):
            paths = differences(manifest, body)
            if paths:
                live_uid, reason = body["metadata"]["uid"], ", ".join(paths[:5])
                applies.append(Apply(manifest, live_uid, reason, tuple(collisions(manifest, body))))
    deletes = [
        Delete(body, "no longer wanted")
        for identity, body in live.items()
        if identity not in desired_identities
        and body["kind"] not in _WRITE_ONCE
        and is_owned(body, uid)
        and not body["metadata"].get("deletionTimestamp")
    ]
    return Writes(tuple(applies), tuple(deletes), tuple(conflicts))


def is_owned(body: Object, uid: str) -> bool:
    """Whether the object's controller is the resource with this uid, or was until someone removed
    the owner reference.

    Without a controller, the object is ours if it has our labels with this uid and our field
    manager: others may copy the labels, but only the operator applies under that name.
    """
    controller = controller_of(body)
    if controller is not None:
        return controller.get("uid") == uid
    labels = body["metadata"].get("labels") or {}
    marked = labels.get(MANAGED_LABEL) == MANAGED_VALUE and labels.get(UID_LABEL) == uid
    return marked and any(
        entry.get("manager") == MANAGER and entry.get("operation") == "Apply"
        for entry in body["metadata"].get("managedFields") or ()
    )


def differences(desired: Any, live: Any, path: str = "") -> list[str]:
    """Dotted paths where ``live`` lacks or contradicts what we render."""
    name = path.rsplit(".", 1)[-1]
    if isinstance(desired, Mapping):
        if live is None and not desired and name in _TEXT_MAPS:
            return []  # the server drops empty maps
        if not isinstance(live, Mapping):
            return [path]
        if name in _TEXT_MAPS:
            return [f"{path}.{key}" for key in desired if live.get(key) != desired[key]]
        paths = [
            path_below
            for key in desired
            for path_below in differences(
                desired[key], live.get(key), f"{path}.{key}" if path else key
            )
        ]
        extra = name in _WHOLE_MAPS and set(live) - set(desired)
        return paths + ([path] if extra else [])
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        return _list_differences(desired, live, path, name)
    if desired == live or (desired == "" and live is None):  # the server drops empty strings
        return []
    if live is None and desired is False and name in _DROPPED_FLAGS:
        return []
    if _is_quantity(path) and _same_quantity(desired, live):
        return []
    return [path]


def _list_differences(desired: Sequence[Any], live: Any, path: str, name: str) -> list[str]:
    if not desired and not live:
        return []  # the server drops empty lists
    if not isinstance(live, Sequence) or isinstance(live, str):
        return [path]
    keys = _keys_of(name, desired)
    if keys is None:
        if len(desired) != len(live):
            return [path]
        pairs = list(zip(desired, live, strict=True))
        return [
            path_below
            for index, (desired_item, live_item) in enumerate(pairs)
            for path_below in differences(desired_item, live_item, f"{path}[{index}]")
        ]
    paths = []
    for desired_item in desired:
        match = [live_item for live_item in live if _matches(desired_item, live_item, keys)]
        label = f"{path}[{desired_item[keys[0]]}]"
        paths += differences(desired_item, match[0], label) if match else [label]
    return paths


def collisions(desired: Any, live: Any, pointer: str = "") -> list[Object]:
    """JSON patch operations that free the names of our list items: a foreign item with such a name
    is replaced where ours is missing, else removed.
    """
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        return [
            operation
            for key in desired
            for operation in collisions(desired[key], live.get(key), f"{pointer}/{key}")
            if "/" not in key and "~" not in key
        ]
    if not isinstance(desired, list) or not isinstance(live, list):
        return []
    operations: list[Object] = []
    keys = _keys_of(pointer.rsplit("/", 1)[-1], desired)
    for index, live_item in enumerate(live):
        mappings = [
            item for item in desired if isinstance(item, Mapping) and isinstance(live_item, Mapping)
        ]
        namesakes = [
            item for item in mappings if "name" in item and item["name"] == live_item.get("name")
        ]
        if not keys or not namesakes:
            continue
        if _matches(namesakes[0], live_item, keys):
            operations += collisions(namesakes[0], live_item, f"{pointer}/{index}")
        elif any(_matches(namesakes[0], candidate, keys) for candidate in live):
            operations.append({"op": "remove", "path": f"{pointer}/{index}"})
        else:
            operations.append(
                {"op": "replace", "path": f"{pointer}/{index}", "value": namesakes[0]}
            )
    return operations


def _keys_of(name: str, desired: Sequence[Any]) -> tuple[str, ...] | None:
    return next(
        (k for k in _MERGE_KEYS.get(name, ()) if desired and all(k[0] in item for item in desired)),
        None,
    )


def _matches(
    desired_item: Mapping[str, Any], live_item: Mapping[str, Any], keys: tuple[str, ...]
) -> bool:
    return all(live_item.get(k) == desired_item[k] for k in keys if k in desired_item)


def _is_quantity(path: str) -> bool:
    parts = path.replace("[", ".[").split(".")
    return parts[-1] in _QUANTITY_FIELDS or (len(parts) > 1 and parts[-2] in _QUANTITY_PARENTS)


def _same_quantity(desired: Any, live: Any) -> bool:
    try:
        return Quantity(desired).stored == Quantity(live).stored
    except ValueError:
        return False


def owner_text(body: Object) -> str:
    """The object's controller, for a message."""
    controller = controller_of(body)
    return f"{controller['kind']} {controller['name']}" if controller else "no controller"
