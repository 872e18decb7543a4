"""A queue with a bound in bytes and in items."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from tiercache.core.keys import ChunkKey

V = TypeVar("V")


class BoundedQueue(Generic[V]):
    """A first-in, first-out queue with one item per key. Every operation is O(1)."""

    def __init__(self, max_bytes: int, max_items: int) -> None:
        self.max_bytes = max_bytes
        self.max_items = max_items
        self.queued_bytes = 0
        self._items: OrderedDict[ChunkKey, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._items

    def has_room(self, item_bytes: int) -> bool:
        """Return True if an item fits.

        An item larger than the bound fits into an empty queue, since it could never be written otherwise.
        """
        if not self._items:
            return True
        return len(self._items) < self.max_items and self.queued_bytes + item_bytes <= self.max_bytes

    def offer(self, key: ChunkKey, value: V, item_bytes: int, *, replace_oldest: bool = False) -> list[V] | None:
        """Append `value`, and return the displaced items; None if there is no room.

        With `replace_oldest`, the oldest items are displaced to make room.
        """
        displaced = []
        while not self.has_room(item_bytes):
            if not replace_oldest:
                return None
            displaced.append(self.take()[1])
        self._items[key] = (value, item_bytes)
        self.queued_bytes += item_bytes
        return displaced

    def take(self) -> tuple[ChunkKey, V]:
        """Remove and return the oldest item. Raises KeyError when the queue is empty."""
        key, (value, item_bytes) = self._items.popitem(last=False)
        self.queued_bytes -= item_bytes
        return key, value

    def discard(self, key: ChunkKey) -> V | None:
        """Remove and return the item of `key`, or None if there is none."""
        value, item_bytes = self._items.pop(key, (None, 0))
        self.queued_bytes -= item_bytes
        return value

    def drain(self) -> list[V]:
        """Remove and return all items."""
        values = [value for value, _ in self._items.values()]
        self._items.clear()
        self.queued_bytes = 0
        return values
