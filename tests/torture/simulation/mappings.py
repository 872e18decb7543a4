"""Files that simulated processes have mapped. Their pages are the bytes of the simulated file."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.torture.simulation.descriptors import Opened
from tests.torture.simulation.inodes import File
from tests.torture.simulation.process import Killed, Process
from tests.torture.simulation.world import World

if TYPE_CHECKING:
    from tests.torture.simulation.files import FileCalls


class Pages:
    """Stands in for `_Pages` of the shared memory tier. The file keeps its blocks until the last view is gone."""

    __slots__ = ("__array_interface__", "_opened", "_view", "_with_others")

    def __init__(self, opened: Opened, length_bytes: int, with_others: set[Opened]) -> None:
        assert isinstance(opened.inode, File)
        self._opened = opened
        self._with_others = with_others
        with_others.add(opened)
        self._view = np.frombuffer(opened.inode.whole(), np.uint8, length_bytes)
        self._view.flags.writeable = False
        self.__array_interface__: dict[str, Any] = self._view.__array_interface__

    def __del__(self) -> None:
        if self._opened in self._with_others:
            self._with_others.remove(self._opened)
            self._opened.close()


class Mappings:
    """The mapped files of all processes of a machine."""

    def __init__(self, world: World) -> None:
        self.calls: FileCalls
        self._world = world
        self._mapped: dict[Process, set[Opened]] = {}

    def map(self, descriptor: int, length_bytes: int) -> Pages:
        strand = self._world.current
        assert strand is not None
        if not strand.process.alive:
            raise Killed
        opened = self.calls.opened_to_map(descriptor)
        return Pages(opened, length_bytes, self._mapped.setdefault(strand.process, set()))

    def die(self, process: Process) -> None:
        mapped = self._mapped.pop(process, set())
        while mapped:
            mapped.pop().close()

    def of(self, process: Process) -> list[str]:
        """Paths with which a process has files mapped, but for those that only garbage refers to."""
        if self._mapped.get(process):
            gc.collect(0)  # the error of a copy keeps its frames, which refer to that error
        return sorted(opened.path for opened in self._mapped.get(process, ()))
