"""What is on its way into memory, by key, so that a forget reaches it before it arrives.

The rule of a forget: what began before it is not visible after it, what begins after it is. A fill, a flight or a late read
is a *passage*; whoever has one asks it before the chunk becomes visible, with no await in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.core.keys import ChunkKey


class Passage:
    """One operation from its begin to its end, and which of its keys were forgotten meanwhile."""

    __slots__ = ("_forgotten", "keys")

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        self.keys = keys
        self._forgotten: set[ChunkKey] | None = None

    def forgot(self, key: ChunkKey) -> bool:
        """Whether `key` was forgotten since this began: what it carries must not be shown to anybody."""
        return self._forgotten is not None and key in self._forgotten

    def forget(self, key: ChunkKey) -> None:
        if self._forgotten is None:
            self._forgotten = set()
        self._forgotten.add(key)


class UnderWay:
    """All passages that have begun and not ended. As large as what the operations themselves hold, and no larger."""

    def __init__(self) -> None:
        self._by_key: dict[ChunkKey, tuple[Passage, ...]] = {}

    def __len__(self) -> int:
        """Keys of which something is under way."""
        return len(self._by_key)

    def begin(self, keys: Sequence[ChunkKey]) -> Passage:
        """A passage of `keys`, some of which may be named twice. It must be ended."""
        passage = Passage(keys)
        by_key = self._by_key
        for key in keys:
            others = by_key.get(key)
            by_key[key] = (passage,) if others is None else (*others, passage)
        return passage

    def end(self, passage: Passage) -> None:
        by_key = self._by_key
        for key in passage.keys:
            passages = by_key.get(key)
            if passages is None:
                continue  # named twice
            if len(passages) == 1:
                if passages[0] is passage:
                    del by_key[key]
            else:
                left = tuple(other for other in passages if other is not passage)
                if left:
                    by_key[key] = left
                else:
                    del by_key[key]

    def forget(self, key: ChunkKey) -> None:
        for passage in self._by_key.get(key, ()):
            passage.forget(key)
