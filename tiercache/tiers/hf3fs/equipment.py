"""What one 3FS daemon is given: rings, buffers and a list of registrations. Blocks; in the engine's thread."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercache.tiers.hf3fs.memory import Buffers, RegisteredMemory
from tiercache.tiers.hf3fs.ring import Ring, RingSettings, Transfer

_JOIN_S = 2.0
_LET_GO_S = 1.0
"""How long a daemon may take to unmap what is not registered any more."""
DEAD_MOUNT = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV)



@dataclass
class Equipment:
    """What one daemon knows of us."""

    rings: dict[bool, list[Ring]]
    """By direction: True reads."""
    buffers: Buffers
    registrations: int
    """A descriptor of the daemon's list of registrations: whether it can be read says whether that daemon is alive."""

    @property
    def works(self) -> bool:
        return all(ring.works for ring in self.all_rings)

    @property
    def all_rings(self) -> list[Ring]:
        return self.rings[True] + self.rings[False]


def equip(
    library: Any,
    mount: Path,
    settings: RingSettings,
    make_buffers: Callable[[], Buffers],
    loop: asyncio.AbstractEventLoop,
    settled: Callable[[list[Transfer]], None],
) -> Equipment:
    """Nothing is kept when it raises (OSError, ConfigError)."""
    registrations = os.open(mount / "3fs-virt" / "iovs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    rings: dict[bool, list[Ring]] = {True: [], False: []}
    buffers = None
    try:
        # Rings first: they cost little, and a mount that refuses them is found out before memory is touched.
        for read in (True, False):
            for number in range(settings.rings):
                ring = library.make_ioring(
                    str(mount), settings.entries, read, settings.io_depth, None, None, settings.numa
                )
                name = f"hf3fs-{'read' if read else 'write'}-{number}"
                rings[read].append(Ring(ring, settings, read=read, loop=loop, settled=settled, name=name))
                del ring  # its thread takes it away
        buffers = make_buffers()
        buffers.registered.register(library, str(mount), settings.numa)
    except BaseException:
        _stop(rings[True] + rings[False])
        if buffers is not None:
            buffers.close()
        os.close(registrations)
        raise
    return Equipment(rings, buffers, registrations)


def is_dead(registrations: int, name: str) -> bool:
    """Whether the daemon behind this descriptor is dead, or another one is there that never knew memory of this name."""
    try:
        return not any(
            os.path.basename(os.readlink(link, dir_fd=registrations)) == name
            for link in os.listdir(registrations)
            if not link.startswith("submit-ios")
        )
    except OSError as error:
        return error.errno in DEAD_MOUNT


def has_died(registrations: int) -> bool:
    """Return True if the daemon behind this descriptor is dead, whoever serves the mount now."""
    try:
        os.listdir(registrations)
    except OSError as error:
        return error.errno in DEAD_MOUNT
    return False


def withdraw(arena: RegisteredMemory) -> bool:
    """Take the arena's registration away; whether nobody else has it mapped then."""
    arena.unregister()
    until_s = time.monotonic() + _LET_GO_S
    while not arena.is_ours_alone():
        if time.monotonic() > until_s:
            return False
        time.sleep(_LET_GO_S / 100)
    return True


def take_away_and_look(equipment: Equipment | None) -> bool:
    """Whether the daemon died meanwhile. Looked at before the registrations go, by which it is known."""
    dead = equipment is not None and is_dead(equipment.registrations, equipment.buffers.registered.name)
    take_away(equipment)
    return dead


def take_away(equipment: Equipment | None) -> None:
    if equipment is not None:
        _stop(equipment.all_rings)
        equipment.buffers.close()
        os.close(equipment.registrations)


def _stop(rings: list[Ring]) -> None:
    for ring in rings:
        ring.close()
    for ring in rings:
        ring.join(_JOIN_S)
