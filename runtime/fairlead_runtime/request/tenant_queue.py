"""What waits, by tenant: whose turn is next.

Owns the order: each tenant's items in the order in which they came, one of each tenant a round, so
that nobody waits behind all that another has sent.
"""

from collections import deque
from collections.abc import Container
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TenantQueue(Generic[Item]):
    """For one thread at a time."""

    def __init__(self) -> None:
        self._items: dict[str, deque[Item]] = {}  # the tenant whose turn is next first

    def add(self, tenant: str, item: Item) -> None:
        """Behind the tenant's others."""
        self._items.setdefault(tenant, deque()).append(item)

    def take(self, passed: Container[str] = ()) -> tuple[str, Item] | None:
        """The tenant whose turn it is and its first item, which waits no longer. Tenants in
        ``passed`` keep their turns. None where nothing else waits.
        """
        tenant = next((name for name in self._items if name not in passed), None)
        if tenant is None:
            return None
        queue = self._items.pop(tenant)
        item = queue.popleft()
        if queue:
            self._items[tenant] = queue
        return tenant, item

    def make_room(self, tenant: str) -> Item | None:
        """Take the last item of the tenant that has most, for another one of ``tenant``; None where
        ``tenant`` would then have more than it.
        """
        longest = max(self._items.values(), key=len, default=deque[Item]())
        if len(longest) < len(self._items.get(tenant, ())) + 2:
            return None
        return longest.pop()

    def discard(self, tenant: str, item: Item) -> None:
        """Remove an item that need not wait any more, where it waits."""
        queue = self._items.get(tenant)
        if queue is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._items[tenant]

    def clear(self) -> list[Item]:
        """Take all items."""
        items = [item for queue in self._items.values() for item in queue]
        self._items.clear()
        return items
