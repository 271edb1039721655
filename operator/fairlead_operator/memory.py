"""The process's memory of resources between passes: one immutable value per resource and kind of
memory.

Each ``Memory`` has one owner, which replaces the values; others get its ``get`` alone. The prober
owns the results of its probes, the reconciler what scaling, the counts of drained requests and the
Events still to be written need. All of it is lost on restart without harm, and nothing of it is
ever a reason to delete an object.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from fairlead_operator.resource.kinds import Key

T = TypeVar("T")


class Memory(Generic[T]):
    """Values by resource. A resource created again under the same name starts with none."""

    def __init__(self) -> None:
        self._values: dict[Key, tuple[str, T]] = {}

    def get(self, key: Key, uid: str) -> T | None:
        entry = self._values.get(key)
        return entry[1] if entry is not None and entry[0] == uid else None

    def put(self, key: Key, uid: str, value: T) -> None:
        self._values[key] = (uid, value)

    def forget(self, key: Key) -> None:
        self._values.pop(key, None)


class Memo(Generic[T]):
    """A pure function of one resource, computed again only when an argument is another: most passes
    find everything as the last one left it. An error is raised each time.
    """

    def __init__(self, compute: Callable[..., T]) -> None:
        self._compute = compute
        self._last: dict[Key, tuple[tuple[Any, ...], T]] = {}

    def __call__(self, key: Key, *arguments: Any) -> T:
        entry = self._last.get(key)
        if entry is None or entry[0] != arguments:
            entry = self._last[key] = arguments, self._compute(*arguments)
        return entry[1]

    def forget(self, key: Key) -> None:
        self._last.pop(key, None)
