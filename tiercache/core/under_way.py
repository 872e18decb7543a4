"""What is on its way into memory, by key, so that a forget reaches it before it arrives.

The rule of a forget: what began before it is not visible after it, what begins after it is. A fill, a flight or a late read
is a *passage*; its owner asks it before the chunk becomes visible, with no await in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.core.keys import ChunkKey

_NONE: set[ChunkKey] = set()
"""Of all passages of which nothing is forgotten, which are nearly all. It stays empty."""


class Passage:
    """One operation from its begin to its end, and which of its keys were forgotten meanwhile."""

    __slots__ = ("forgotten", "keys")

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        self.keys = keys
        self.forgotten = _NONE
        """Of them, since this began: what it carries of these must not be shown to anybody."""

    def forgot(self, key: ChunkKey) -> bool:
        return key in self.forgotten

    def forget(self, key: ChunkKey) -> None:
        if self.forgotten is _NONE:
            self.forgotten = set()
        self.forgotten.add(key)


class UnderWay:
    """All passages that have begun and not ended. As large as what the operations themselves hold, and no larger."""

    def __init__(self) -> None:
        self._by_key: dict[ChunkKey, Passage | tuple[Passage, ...]] = {}
        """Nearly every key has one: that is kept as it is."""

    def __len__(self) -> int:
        """Keys of which something is under way."""
        return len(self._by_key)

    def begin(self, keys: Sequence[ChunkKey]) -> Passage:
        """A passage of `keys`, some of which may be named twice. It must be ended."""
        passage = Passage(keys)
        by_key = self._by_key
        for key in keys:
            others = by_key.setdefault(key, passage)
            if others is not passage:  # else there were none, or the key is named twice
                by_key[key] = (others, passage) if isinstance(others, Passage) else (*others, passage)
        return passage

    def end(self, passage: Passage) -> None:
        by_key = self._by_key
        for key in passage.keys:
            there = by_key.pop(key, passage)
            if there is passage:
                continue  # nothing else; or the key is named twice
            if isinstance(there, Passage):
                by_key[key] = there
            elif left := tuple(other for other in there if other is not passage):
                by_key[key] = left

    def forget(self, key: ChunkKey) -> None:
        there = self._by_key.get(key, ())
        for passage in (there,) if isinstance(there, Passage) else there:
            passage.forget(key)
