"""A directory whose chunks are only read (`role: read`): nothing in it is made, changed or removed."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.capacity import Capacity, Mark
from tiercache.tiers.files.manifest import check_manifest, reads_directly
from tiercache.tiers.files.survey import TOP_LEVELS, Surveyor
from tiercache.tiers.files.volume import Volume


class NoCapacity(Capacity):
    """A reader counts nothing."""

    used_bytes = counted_bytes = 0
    trusted = True
    missing = is_behind = False

    def __init__(self) -> None:
        pass

    def refresh(self) -> bool:
        return True


class OnlyRead(Volume):
    """Synchronous, for worker threads, as `Volume` is."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.capacity = NoCapacity()
        self.surveyor = Surveyor(self.root, self._owner, self.access, changes=False)

    def open(self) -> None:
        """A directory that is missing may be made later, by whoever writes to it. Raises OSError, WrongFormat."""
        with suppress(FileNotFoundError):
            self.identity.note()
            check_manifest(self.root)
        self.direct = self.wants_direct is not False and reads_directly(self.root)

    def close(self) -> None:
        """Nothing is open."""

    def is_wiped(self) -> bool:
        return False

    def quarantine(self, key: ChunkKey) -> None:
        """A bad chunk stays where it is."""

    def begin_scan(self) -> tuple[Mark, list[str]]:
        there = frozenset(os.listdir(self.root))
        return Mark(False, 0, 0, 0, 0), [top for top in TOP_LEVELS if top in there]

    def recount(self, mark: Mark, found_bytes: int) -> int:
        return 0
