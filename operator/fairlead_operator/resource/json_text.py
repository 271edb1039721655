"""JSON from outside the operator: from pods, the hub, the API server and files.

Owns the one error of every such text, however it is faulty, and the bounds of the numbers in it.
"""

import json
from typing import Any

from fairlead_runtime.sizing.arithmetic import DEEPEST_JSON, depth_of

LARGEST = 2**63 - 1  # the API server takes no larger integer


def json_value(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_object(text: str | bytes) -> dict[str, Any]:
    """The object of a JSON text. Raises ValueError for any other value, and for an object of more
    than ``DEEPEST_JSON`` levels.
    """
    value = json_value(text)
    if not isinstance(value, dict):
        raise ValueError("it is not an object")  # noqa: TRY004 - as any other faulty text
    if depth_of(value) > DEEPEST_JSON:
        raise ValueError("it is nested too deeply")
    return value


def count_of(value: Any, most: int = LARGEST) -> int | None:
    """``value`` if it is a whole number from 0 to ``most``, else None. A truth value is none."""
    return value if type(value) is int and 0 <= value <= most else None
