"""The operations in flight in one tier, by key, so that a removal has its key to itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercache.core.key_filter import KeyFilter
from tiercache.core.keys import ChunkKey


class KeyTraffic:
    """Reads and writes of a tier, counted by key, and the keys that are to be removed.

    A removal begins when no read or write of its key is in flight. From the moment at which it is wanted until it has ended
    nothing of the key begins: a late write cannot bring back a forgotten chunk, a read cannot find it, and new bytes are
    written after it. Each read and write calls `begin` and `end`, abandoned ones included.
    """

    def __init__(self) -> None:
        self._in_flight: dict[ChunkKey, int] = {}
        self._removing: set[ChunkKey] = set()
        self._refused = KeyFilter()
        self.on_clear: Callable[[ChunkKey], None] | None = None
        """Called when the last operation in flight of a key that is to be removed has ended."""
        self.questions: set[Any] = set()
        """Look-ups in flight, as futures."""
        self.answered = 0
        """Look-ups that have ended."""

    def refuses(self, key: ChunkKey) -> bool:
        """Return True if nothing of `key` may begin now, whatever the tier has of it."""
        return key in self._removing or key in self._refused

    @property
    def refuses_none(self) -> bool:
        return not self._removing and not self._refused

    def begin(self, key: ChunkKey) -> None:
        self._in_flight[key] = self._in_flight.get(key, 0) + 1

    def end(self, key: ChunkKey) -> None:
        left = self._in_flight[key] - 1
        if left:
            self._in_flight[key] = left
            return
        del self._in_flight[key]
        if key in self._removing and self.on_clear is not None:
            self.on_clear(key)

    def asks(self, question: Any) -> None:
        """Note that a look-up begins."""
        self.questions.add(question)

    def asked(self, question: Any) -> None:
        """Note that a look-up has ended."""
        self.questions.discard(question)
        self.answered += 1

    def want_removal(self, key: ChunkKey) -> bool:
        """Let nothing of `key` begin any more. Return True if its removal may begin at once; otherwise `on_clear` is called
        when it may."""
        self._removing.add(key)
        return key not in self._in_flight

    def removed(self, key: ChunkKey) -> None:
        """Note that the removal has ended: what begins from now on finds only what was written since."""
        self._removing.discard(key)

    def refuse(self, key: ChunkKey) -> None:
        """Let nothing of `key` begin for good: it was forgotten, and is not removed here. A few other keys are refused with
        it (`KeyFilter`)."""
        self._refused.add(key)
