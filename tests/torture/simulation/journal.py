"""Which changes of names a power cut takes back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tests.torture.simulation.inodes import Directory, Inode

_WRITTEN_AFTER_NS = 30_000_000_000
"""XFS writes its log out so often (`xfssyncd_centisecs`), ext4 every 5 s (`commit=`)."""


@dataclass(frozen=True, slots=True)
class Naming:
    """A name in a directory, and what had it before."""

    directory: Directory
    name: str
    before: Inode | None


class Journal:
    """The changes of names that are not certainly on the device, in their order. Each is kept whole or not at all."""

    def __init__(self) -> None:
        self._changes: deque[tuple[int, Sequence[Naming]]] = deque()
        self._first = 0
        """The number of the oldest change that is still here."""

    def note(self, now_ns: int, namings: Sequence[Naming], *concerned: Inode) -> None:
        """One change, before it is made; a sync of one of the inodes that it concerns is to make it durable."""
        number = self._first + len(self._changes)
        for inode in concerned:
            inode.logged = number
            if inode.born < 0:
                inode.born = number
        self._changes.append((now_ns, namings))
        while self._changes[0][0] < now_ns - _WRITTEN_AFTER_NS:
            self._changes.popleft()
            self._first += 1

    def commit(self, number: int) -> None:
        """The change of this number is durable, and with it all that came before."""
        while self._first <= number and self._changes:
            self._changes.popleft()
            self._first += 1

    def lose_power(self, chance: random.Random) -> None:
        """Take back the last of the changes, as many as chance says; what is left is durable."""
        changes = self._changes
        self._first += len(changes)
        for _ in range(chance.randint(0, len(changes))):
            for naming in reversed(changes.pop()[1]):
                if naming.before is None:
                    del naming.directory.names[naming.name]
                else:
                    naming.directory.names[naming.name] = naming.before
        changes.clear()
