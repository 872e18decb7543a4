"""A simulated machine's fittings at work: what stands in for the mount table, the accelerator, 3FS and shared memory."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.torture.simulation import own
from tests.torture.simulation.cufile import make_kvikio
from tests.torture.simulation.fittings import MEMORY
from tests.torture.simulation.hf3fs_daemon import Daemon, RingWeather
from tests.torture.simulation.mappings import Mappings
from tests.torture.simulation.own import make_own
from tests.torture.simulation.plan import FILE_BYTES, Setting, places_of
from tests.torture.simulation.process import Process
from tests.torture.simulation.shared_memory import SharedMemory
from tests.torture.simulation.system import ROOT, Stand, changed
from tests.torture.simulation.twin import DeviceWeather, SimulatedTwin
from tests.torture.simulation.usrbio import library_of
from tests.torture.simulation.weather import Weather
from tiercache.assembly import WEKAFS, hf3fs_settings
from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.config.plan import PlannedTier
from tiercache.core.header import file_bytes
from tiercache.core.layout import Layout
from tiercache.tiers.files.access import Mount
from tiercache.tiers.files.directory import TOP_LEVELS
from tiercache.tiers.hf3fs import Hf3fsSettings

if TYPE_CHECKING:
    from tests.torture.simulation.files import Disk, FileCalls
    from tests.torture.simulation.world import World

_DEVICE_SLOT_BYTES = FILE_BYTES
_TOP_LEVELS, _EVERY_TOP_LEVEL = 16, 1 / 16
"""Subdirectories that are looked at: keys lie in three, and to ask for 256 at each start and every second would be most of
a seed. Some seeds do it."""


_MOST_MAPPINGS = 24
"""Of a process: some caps allow more chunks."""
_REFRESH_S = 1.0
"""To list shared memory ten times a second would be most of a seed."""


class Machine:
    """One for a run. Processes come and go on it."""

    def __init__(self, world: World, setting: Setting, now: Callable[[], float]) -> None:
        self.world = world
        self.setting = setting
        self.fittings = setting.fittings
        self.weathers = {place: make_weather(world, place, self) for place in places_of(setting)}
        self.twins: dict[Process, SimulatedTwin] = {}
        self.memory = SharedMemory(f"{ROOT}/shm", now)
        self.mappings = Mappings(world)
        self.daemon: Daemon | None = None
        every = random.Random(f"top levels {world.seed}").random() < _EVERY_TOP_LEVEL
        self._top_levels = TOP_LEVELS if every else TOP_LEVELS[:_TOP_LEVELS]

    def attach(self, calls: FileCalls, disks: Mapping[str, Disk]) -> None:
        self.memory.calls = self.mappings.calls = calls
        if "hf3fs" in disks:
            weather = self.weathers["hf3fs"]
            assert isinstance(weather, RingWeather)
            self.daemon = Daemon(self.world, disks["hf3fs"], weather, self.memory)
            self.daemon.calls = calls

    def config(self, disks: dict[str, Disk], number: int) -> dict[str, Any]:
        """Of the process `number`."""
        setting = self.setting
        tiers = set(setting.tiers)
        cap_gb = setting.options.get("max_local_disk_size", 24 * FILE_BYTES / 2**30)
        slots = self.fittings.device_slots
        values: dict[str, Any] = {"device": "cpu" if slots else "none"}
        if tiers & {"weka", "gds"}:
            place = "weka" if "weka" in tiers else "gds"
            use_gds = self.fittings.way == "cufile"
            values |= {f"{place}_path": f"{disks[place].root}/kv", "max_gds_size": cap_gb, "use_gds": use_gds}
            values["gds_buffer_size"] = max(1, slots)
        if "hf3fs" in tiers:
            values |= {
                "remote_storage_plugins": "hf3fs",
                "remote_storage_plugin.hf3fs.base_path": f"{disks['hf3fs'].root}/kv",
                "hf3fs_io_thread_num": 2,
            }
            if self.fittings.shared_arena:
                values["shm_name"] = f"kv-{number}"
        if "own" in tiers:
            named = {name: text.format(place=disks["own"].root) for name, text in self.fittings.own_options.items()}
            named |= {"module_path": make_own.__module__, "class_name": make_own.__name__, "timeout_s": "1.0"}
            values["remote_storage_plugins"] = " ".join([*values.get("remote_storage_plugins", "").split(), "own"])
            values |= {f"remote_storage_plugin.own.{name}": text for name, text in named.items()}
        return values

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """After the system."""
        replacements: list[tuple[str, str, Any]] = [
            ("tiercache.tiers.files.access", "mounts", self._mounts),
            ("tiercache.tiers.files.chunk_files", "TOP_LEVELS", self._top_levels),
            ("tiercache.tiers.files.index", "TOP_LEVELS", self._top_levels),
            # Of 1 MiB each there would be 128 slots, and more.
            ("tiercache.assembly", "MIB", _DEVICE_SLOT_BYTES),
            ("tiercache.assembly", "Driver", self._make_twin),
            ("tiercache.tiers.gds", "probe_gds", _gds_works),
            ("tiercache.tiers.gds", "import_kvikio", make_kvikio),
            ("tiercache.memory.arena", "SHM_DIRECTORY", self.memory.path),
            ("tiercache.memory.arena", "mmap", Stand(mmap, mmap=self.memory.mmap)),
            (
                "tiercache.memory.arena",
                "fcntl",
                Stand(sys.modules["tiercache.memory.arena"].fcntl, fcntl=self.memory.fcntl),
            ),
            ("tiercache.tiers.shared_memory", "_Pages", self.mappings.map),
            ("tiercache.tiers.shared_memory", "max_mappings", lambda: _MOST_MAPPINGS),
            ("tiercache.tiers.shared_memory", "_REFRESH_S", _REFRESH_S),
            ("tiercache.tiers.hf3fs.ring", "SHM_DIRECTORY", self.memory.path),
            ("tiercache.tiers.hf3fs.ring", "tempfile", Stand(tempfile, mkstemp=self.memory.mkstemp)),
        ]
        if self.daemon is not None:
            calls = self.daemon.calls
            replacements += [
                ("tiercache.tiers.hf3fs.tier", "load_library", functools.partial(library_of, self.daemon)),
                ("tiercache.tiers.hf3fs.files", "os", Stand(os, dup=calls.dup)),
                ("tiercache.tiers.hf3fs.engine", "os", Stand(os, dup=calls.dup)),
                ("tiercache.assembly", "hf3fs_settings", self._few_places),
            ]
        with contextlib.ExitStack() as stack:
            for module, name, value in replacements:
                stack.enter_context(changed(sys.modules[module], name, value))
            if self.fittings.own:
                stack.enter_context(changed(own, "GIVEN", [own.Given(self.fittings.own, self.weathers["own"])]))
            yield

    def die(self, process: Process) -> None:
        """What it had of this goes with it."""
        self.twins.pop(process, None)
        self.mappings.die(process)
        if self.daemon is not None:
            self.daemon.forget(process)

    def cut_power(self) -> None:
        """After all processes have died."""
        self.memory.cut_power()
        if self.daemon is not None:
            self.daemon.die()
            self.weathers["hf3fs"].clear()
            self.daemon.begin()

    def is_broken_for(self, process: Process, cache: TierCache) -> bool:
        """Whether it has something that only comes back with another process: a device that is lost, or memory that was
        given up because the device did not say when its copies end."""
        twin = self.twins.get(process)
        on_device = cache.parts.on_device
        if twin is None or on_device is None:
            return False
        return twin.is_lost or bool(on_device.device.unfinished)

    def is_behind(self, process: Process) -> bool:
        """Return True if it has rings of a daemon that has died."""
        client = None if self.daemon is None else self.daemon.clients.get(process)
        return client is not None and client.behind

    def left_by(self, process: Process) -> dict[str, Any]:
        """What a process that has closed its cache still holds."""
        left: dict[str, Any] = {"mapped files": self.mappings.of(process)}
        if (twin := self.twins.get(process)) is not None and not twin.is_lost:
            left["pinned memory"] = twin.pinned
        if self.daemon is not None and (client := self.daemon.clients.get(process)) is not None:
            left |= {
                "files that rings know": sorted(client.files.keys() - client.stale),
                "rings": client.rings,
                "buffers of rings": client.iovs,
            }
        return left

    def lose_devices(self) -> None:
        for twin in self.twins.values():
            twin.lose()

    def _mounts(self) -> list[Mount]:
        found = [Mount("/", "ext4")]
        if "weka" in self.setting.tiers:
            found.append(Mount(f"{ROOT}/weka", WEKAFS))
        if MEMORY in self.setting.tiers:
            found.append(Mount(f"{ROOT}/{MEMORY}", "tmpfs"))
        return found

    def _make_twin(self, total_bytes: int) -> SimulatedTwin:
        strand = self.world.current
        assert strand is not None
        weather = self.weathers["gpu"]
        assert isinstance(weather, DeviceWeather)
        twin = SimulatedTwin(strand.process, weather, pins=self.fittings.pins)
        self.twins[strand.process] = twin
        return twin

    def _few_places(self, config: Config, layout: Layout, planned: PlannedTier) -> Hf3fsSettings:
        """Fewer than the configuration allows: there would always be a place and an entry."""
        settings, fittings = hf3fs_settings(config, layout, planned), self.fittings
        rings = replace(settings.rings, entries=fittings.ring_entries)
        iov_bytes = fittings.ring_places * file_bytes(layout.chunk_bytes)
        return replace(settings, iov_bytes=iov_bytes, rings=rings)


def make_weather(world: World, place: str, machine: Machine) -> Weather:
    if place == "gpu":
        return DeviceWeather(world, place, machine.lose_devices)
    if place == "hf3fs":
        return RingWeather(world, place)
    weather = Weather(world, place, slow_is_fault=place != "remote")
    weather.far_s = random.Random(f"far {world.seed}").choice([40e-6, 40e-6, 1e-3, 0.01])
    return weather


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
