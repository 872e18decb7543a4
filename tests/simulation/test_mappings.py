"""Files that simulated processes map: pages of their own, which outlive the name."""

import os

import numpy as np
import pytest

from tests.simulation.test_world import run
from tests.torture.simulation.files import Disk, FileCalls
from tests.torture.simulation.mappings import Mappings
from tests.torture.simulation.process import Killed, Process
from tests.torture.simulation.world import World

_BYTES = 8192


class Machine:
    """One process, and the shared memory that it maps."""

    def __init__(self) -> None:
        self.world = World(0)
        self.disk = Disk("/simulated/shared_memory", 100 * 4096)
        self.calls = FileCalls([self.disk])
        self.mappings = Mappings(self.world)
        self.mappings.calls = self.calls
        self.process = Process(self.world, 2)
        self.calls.process = self.process

    def map(self) -> np.ndarray:
        descriptor = self.calls.open("/simulated/shared_memory/chunk", os.O_RDWR | os.O_CREAT)
        self.calls.pwrite(descriptor, b"\1" * 4096, 0)
        self.calls.ftruncate(descriptor, _BYTES)
        memory = np.asarray(self.mappings.map(descriptor, _BYTES))
        self.calls.close(descriptor)
        return memory


def test_pages_outlive_the_name_and_are_freed_with_their_last_view() -> None:
    machine = Machine()

    def check() -> None:
        free = machine.disk.free_blocks
        memory = machine.map()
        view = memory[4000:]
        assert not view.flags.writeable
        assert view[:97].tolist() == 96 * [1] + [0]
        machine.calls.unlink("/simulated/shared_memory/chunk")
        del memory
        assert machine.mappings.of(machine.process)
        assert machine.disk.free_blocks < free
        del view
        assert not machine.mappings.of(machine.process)
        assert machine.disk.free_blocks == free

    run(machine.world, check, process=machine.process)


def test_a_process_that_dies_keeps_nothing() -> None:
    machine = Machine()

    def check() -> None:
        free = machine.disk.free_blocks
        memory = machine.map()
        machine.calls.unlink("/simulated/shared_memory/chunk")
        machine.process.alive = False
        machine.mappings.die(machine.process)
        assert machine.disk.free_blocks == free
        assert memory[0] == 1  # what it still has on its stacks
        with pytest.raises(Killed):
            machine.mappings.map(0, _BYTES)
        machine.process.alive = True

    run(machine.world, check, process=machine.process)
