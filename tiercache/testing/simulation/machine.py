"""A simulated machine's fittings at work: what stands in for the mount table, the accelerator, 3FS and shared memory."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.assembly import WEKAFS
from tiercache.device.events import EventBridge
from tiercache.testing.simulation.cufile import make_kvikio
from tiercache.testing.simulation.pipes import Pipes
from tiercache.testing.simulation.plan import FILE_BYTES, Setting, places_of
from tiercache.testing.simulation.process import Process
from tiercache.testing.simulation.system import ROOT, Stand, changed
from tiercache.testing.simulation.twin import SimulatedTwin
from tiercache.testing.simulation.weather import Weather
from tiercache.tiers.mounts import Mount

if TYPE_CHECKING:
    from tiercache.testing.simulation.files import Disk
    from tiercache.testing.simulation.world import World

_DEVICE_SLOT_BYTES = FILE_BYTES


class Machine:
    """One for a run. Processes come and go on it."""

    def __init__(self, world: World, setting: Setting, now: Callable[[], float]) -> None:
        self.world = world
        self.setting = setting
        self.fittings = setting.fittings
        self.weathers = {place: make_weather(world, place, self) for place in places_of(setting)}
        self.twins: dict[Process, SimulatedTwin] = {}
        self.pipes = Pipes(world, lambda: self.weathers["gpu"].strikes("no-pipes"))
        self.extra_disks: list[Disk] = []

    def config(self, disks: dict[str, Disk], number: int) -> dict[str, Any]:
        """Of the process `number`."""
        setting = self.setting
        tiers = set(setting.tiers)
        cap_gb = setting.options.get("max_local_disk_size", 24 * FILE_BYTES / 2**30)
        slots = self.fittings.device_slots
        values: dict[str, Any] = {"device": "twin" if slots else "none"}
        if tiers & {"weka", "gds"}:
            place = "weka" if "weka" in tiers else "gds"
            use_gds = self.fittings.way == "cufile"
            values |= {f"{place}_path": f"{disks[place].root}/kv", "max_gds_size": cap_gb, "use_gds": use_gds}
            values["gds_buffer_size"] = max(1, slots)
        return values

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """After the system."""
        replacements: list[tuple[str, str, Any]] = [
            ("tiercache.tiers.mounts", "mounts", self._mounts),
            # Of 1 MiB each there would be 128 slots, and more.
            ("tiercache.assembly", "MIB", _DEVICE_SLOT_BYTES),
            ("tiercache.assembly", "TwinDriver", self._make_twin),
            ("tiercache.device.device", "EventBridge", self._make_bridge),
            ("tiercache.device.events", "os", Stand(os, pipe2=self.pipes.pipe2, close=self.pipes.close)),
            ("tiercache.device.events", "select", Stand(sys.modules["select"], epoll=self.pipes.epoll)),
            ("tiercache.device.events", "ctypes", self.pipes.ctypes),
            ("tiercache.tiers.gds", "probe_gds", _gds_works),
            ("tiercache.tiers.cufile", "import_kvikio", make_kvikio),
        ]
        with contextlib.ExitStack() as stack:
            for module, name, value in replacements:
                stack.enter_context(changed(sys.modules[module], name, value))
            yield

    def die(self, process: Process) -> None:
        """What it had of this goes with it."""
        self.pipes.die(process)
        self.twins.pop(process, None)

    def is_broken_for(self, process: Process) -> bool:
        """Whether it has something that only comes back with another process."""
        twin = self.twins.get(process)
        return twin is not None and twin.is_lost

    def left_by(self, process: Process) -> dict[str, Any]:
        """What a process that has closed its cache still holds."""
        left: dict[str, Any] = {"pipes": self.pipes.left_by(process)}
        if (twin := self.twins.get(process)) is not None and not twin.is_lost:
            left |= twin.holds()
        return left

    def lose_devices(self) -> None:
        for twin in self.twins.values():
            twin.lose()

    def _mounts(self) -> list[Mount]:
        found = [Mount("/", "ext4")]
        if "weka" in self.setting.tiers:
            found.append(Mount(f"{ROOT}/weka", WEKAFS))
        return found

    def _make_twin(self, total_bytes: int) -> SimulatedTwin:
        strand = self.world.current
        assert strand is not None
        twin = SimulatedTwin(
            strand.process, self.weathers["gpu"], kernels=self.fittings.kernels, pins=self.fittings.pins
        )
        self.twins[strand.process] = twin
        return twin

    def _make_bridge(self, driver: Any) -> EventBridge:
        return EventBridge(driver, self.fittings.bridge)


class DeviceWeather(Weather):
    """An accelerator's. "lost" is for good, for all who use it now."""

    def __init__(self, world: World, name: str, machine: Machine) -> None:
        super().__init__(world, name)
        self._machine = machine

    def turn(self, kind: str, rate: float) -> None:
        if kind == "lost":
            self.last_fault_s = self.world.now_s
            self.met[kind] += 1
            self._machine.lose_devices()
        else:
            super().turn(kind, min(rate, 0.3))

    def before_work(self) -> None:
        """At the beginning of each piece of work, in its stream."""
        self.hold()


def make_weather(world: World, place: str, machine: Machine) -> Weather:
    if place == "gpu":
        return DeviceWeather(world, place, machine)
    return Weather(world, place, slow_is_fault=place != "remote")


def disks_of(tier: str) -> tuple[str, ...]:
    """The names of the disks that a tier uses."""
    if tier == "disk2":
        return ("disk2a", "disk2b")
    return () if tier == "remote" else (tier,)


def place_of(disk: Disk) -> str:
    """Whose weather is a disk's."""
    name = disk.root.rpartition("/")[2]
    return "disk2" if name.startswith("disk2") else name


async def _gds_works(directories: list[Path], driver: Any) -> str:
    return ""
