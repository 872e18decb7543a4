"""The simulated 3FS: what of it is a process's, and what is its daemon's."""

import os
from types import SimpleNamespace

import pytest

import tiercache.cache  # noqa: F401 - whose modules the system takes the place of
from tests.simulation.test_world import run
from tests.torture.simulation.disk import Disk
from tests.torture.simulation.files import FileCalls
from tests.torture.simulation.hf3fs_daemon import Daemon, RingWeather
from tests.torture.simulation.process import Process
from tests.torture.simulation.shared_memory import SharedMemory
from tests.torture.simulation.system import ROOT, System
from tests.torture.simulation.usrbio import library_of
from tests.torture.simulation.world import World

MOUNT = f"{ROOT}/hf3fs"


class Mount:
    """One, with two processes and what they ask of it."""

    def __init__(self) -> None:
        self.world = World(0)
        self.disk = Disk(MOUNT, 1 << 20, lambda: self.world.now_s)
        self.memory = SharedMemory(f"{ROOT}/shm", lambda: self.world.now_s)
        self.weather = RingWeather(self.world, "hf3fs")
        self.calls = FileCalls([self.disk, self.memory.disk], self._before)
        self.memory.calls = self.calls
        self.daemon = Daemon(self.world, self.disk, self.weather, self.memory)
        self.daemon.calls = self.calls
        self.asked: list[tuple[Process, str]] = []
        self.processes = [Process(self.world, number, self._entered) for number in (1, 2)]

    def _entered(self, process: Process) -> None:
        self.calls.process = process

    def _before(self, name: str, disk: Disk, target: object) -> object:
        if disk is not self.disk:
            return None
        assert self.world.current is not None
        self.asked.append((self.world.current.process, name))
        return self.weather.before(name, disk, target)

    def ask(self) -> None:
        """The calling process reads a block by a ring that it drops then."""
        library = library_of(self.daemon)
        segment, path = self.memory.mkstemp("iov")
        os.ftruncate(segment, 4096)
        buffer = memoryview(self.memory.mmap(segment, 4096))
        iov = library.make_iovec(SimpleNamespace(name=os.path.basename(path), buf=buffer), MOUNT)
        file = os.open(f"{MOUNT}/file", os.O_RDWR | os.O_CREAT)
        library.register_fd(file)
        ring = library.make_ioring(MOUNT, 4, True, 0, None, None, -1)
        ring.prepare(iov[0:4096], True, file, 0)


@pytest.mark.parametrize("fault", ["stuck", "late", "silent"])
def test_no_ring_outlives_its_process_s_use_of_it_in_the_daemon(fault: str) -> None:
    """Otherwise the process that makes the daemon drop its work would call the mount, which may hang."""
    mount = Mount()
    owner, other = mount.processes

    def asks() -> None:
        mount.weather.turn(fault, 1.0)
        mount.ask()
        assert library_of(mount.daemon).client.rings == 0

    def ends_the_daemon() -> None:
        mount.world.pause(0.1)
        mount.weather.turn("hung", 1.0)
        mount.weather.turn("dead", 1.0)
        mount.weather.clear()
        assert asking.ended

    with System(mount.world, mount.calls, lambda: None).installed():
        asking = mount.world.start(owner, "asks", asks)
        run(mount.world, ends_the_daemon, process=other)
    assert {process for process, _ in mount.asked} == {owner}
    assert (owner, "unlink") in mount.asked
