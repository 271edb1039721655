"""Events on a resource, as bodies: the name follows from the content, so one is there once whoever wrote it when."""

import hashlib
from datetime import datetime

from fairlead_operator.blockers import printable
from fairlead_operator.kinds import EVENT, MANAGER, RESOURCE, Object


def event_about(resource: Object, kind: str, reason: str, message: str, about: str, now: datetime) -> Object:
    """``kind``: Normal or Warning; ``about`` tells two Events of the same reason apart."""
    meta = resource["metadata"]
    identity = "\n".join([meta["uid"], reason, about])
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
        "type": kind,
        "reason": reason,
        "message": printable(message),
        "source": {"component": MANAGER},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
