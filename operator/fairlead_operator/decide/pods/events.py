"""Events on a resource: which changes get one, and its body. Pure.

The name follows from the content, so an Event exists once however often it is written.
"""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from fairlead_operator.decide.pods.blockers import NORMAL, printable
from fairlead_operator.resource.kinds import EVENT, MANAGER, RESOURCE, Object


class Note(NamedTuple):
    """The content of an Event. ``about`` distinguishes two of the same reason."""

    reason: str
    message: str
    about: str
    kind: str = "Normal"  # or Warning


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Note]:
    """The Events for the change from one status to the next.

    One for the first blocker when it changes, for every other whose code is new, and for the end of
    the last.
    """
    old_blockers, new_blockers = old.get("blockers") or (), new.get("blockers") or ()
    if old_blockers and not new_blockers:
        ready: Mapping[str, Any] = next(
            (c for c in new.get("conditions") or () if c["type"] == "Ready"), {}
        )
        reason = "Ready" if ready.get("status") == "True" else "Unblocked"
        over = f"{old_blockers[0]['code']} is over: {ready.get('message', '')}"
        return [Note(reason, over, str(old_blockers[0].get("since")))]
    codes = {blocker["code"] for blocker in old_blockers}
    notes = []
    for index, blocker in enumerate(new_blockers):
        first = index == 0 and (
            not old_blockers or _identity(old_blockers[0]) != _identity(blocker)
        )
        if first or blocker["code"] not in codes:
            codes.add(blocker["code"])
            kind = "Normal" if blocker["code"] in NORMAL else "Warning"
            about = f"{blocker.get('object', '')} {blocker.get('since', '')}"
            notes.append(
                Note(blocker["code"], f"{blocker['message']} ({blocker['hint']})", about, kind)
            )
    return notes


def _identity(blocker: Mapping[str, Any]) -> tuple[Any, Any]:
    return blocker.get("code"), blocker.get("object")


def event_about(resource: Object, note: Note, now: datetime) -> Object:
    """The body of an Event on this resource."""
    meta = resource["metadata"]
    identity = "\n".join([meta["uid"], note.reason, note.about])
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {
            "name": f"{meta['name']}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}",
            "namespace": meta["namespace"],
        },
        "involvedObject": {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.name,
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": note.kind,
        "reason": note.reason,
        "message": printable(note.message),
        "source": {"component": MANAGER},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
