"""What of each key is under way in one tier, so that a removal has its key to itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercache.core.key_filter import KeyFilter
from tiercache.core.keys import ChunkKey


class KeyTraffic:
    """Reads and writes of a tier, counted by key, and the keys that are to be removed.

    A removal begins when nothing of its key is under way any more. From the moment on that it is wanted until it has ended,
    nothing of the key begins: a late write cannot bring back what was forgotten, a read cannot find it, and the bytes that
    are put next come after it. Who reads or writes says so with `begin` and `end`, also of what hangs.
    """

    def __init__(self) -> None:
        self._under_way: dict[ChunkKey, int] = {}
        self._removing: set[ChunkKey] = set()
        self._refused = KeyFilter()
        self.on_clear: Callable[[ChunkKey], None] | None = None
        """Called when the last of what was under way of a key that is to be removed has ended."""
        self.questions: set[Any] = set()
        """Look-ups under way, as whoever asks can await them."""
        self.answered = 0
        """Look-ups that have ended."""

    def refuses(self, key: ChunkKey) -> bool:
        """Whether nothing of `key` may begin now, whatever the tier has of it."""
        return key in self._removing or key in self._refused

    @property
    def refuses_none(self) -> bool:
        return not self._removing and not self._refused

    def begin(self, key: ChunkKey) -> None:
        self._under_way[key] = self._under_way.get(key, 0) + 1

    def end(self, key: ChunkKey) -> None:
        left = self._under_way[key] - 1
        if left:
            self._under_way[key] = left
            return
        del self._under_way[key]
        if key in self._removing and self.on_clear is not None:
            self.on_clear(key)

    def asks(self, question: Any) -> None:
        """A look-up begins."""
        self.questions.add(question)

    def asked(self, question: Any) -> None:
        """It has ended."""
        self.questions.discard(question)
        self.answered += 1

    def want_removal(self, key: ChunkKey) -> bool:
        """Nothing of `key` begins any more; whether its removal may begin at once. Else `on_clear` will say so."""
        self._removing.add(key)
        return key not in self._under_way

    def removed(self, key: ChunkKey) -> None:
        """The removal has ended: what begins from now on finds only what was written since."""
        self._removing.discard(key)

    def refuse(self, key: ChunkKey) -> None:
        """Nothing of `key` begins any more: it was forgotten, and is not removed here. Of other keys few are refused with it
        (`KeyFilter`)."""
        self._refused.add(key)
