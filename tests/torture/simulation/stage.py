"""What a run takes place on: its machine, disks, server and processes, and what may be said against them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

from tests.device import twin
from tests.torture.simulation import remote
from tests.torture.simulation.coverage import Coverage
from tests.torture.simulation.files import Disk, FileCalls
from tests.torture.simulation.fittings import MEMORY
from tests.torture.simulation.machine import Machine, disks_of, place_of
from tests.torture.simulation.node import Node
from tests.torture.simulation.oracle import Truth, Violation
from tests.torture.simulation.places import Place
from tests.torture.simulation.plan import CHUNK_BYTES, FILE_BYTES, Operation, Setting, cap_bytes
from tests.torture.simulation.process import Process
from tests.torture.simulation.remote import Server
from tests.torture.simulation.system import ROOT, System, changed
from tests.torture.simulation.world import World
from tiercache.config import Config
from tiercache.core.header import PACKED_BYTES
from tiercache.core.layout import Layout
from tiercache.tiers.files.chunk_files import ChunkFiles

_URL = "simulated://server"
PROBES = 200
"""Keys of each process that are put to see whether it works again."""
_FILLERS = 260
"""Keys that are put to fill directories, and more than fit."""
_BESIDE_BYTES = 32 * 4096
"""On each device, for what is not a chunk."""
_CALLS_A_LOOK = 32
_RECENT_S = 130.0
_ENDED_S = 0.001
"""When threads have ended that the last step of a close tells to end, and that nobody waits for."""
_LONGEST_S = 50_000.0
"""What no run takes, of its own time: those of 300 operations take 1,000 s."""


class Stage:
    """Of one seed. Its director is a process that never dies: what makes things happen runs there."""

    def __init__(self, seed: int, setting: Setting) -> None:
        self.setting = setting
        self.world = World(seed)
        self.world.ends_s = self.world.now_s + _LONGEST_S
        self.key_count = setting.keys + setting.processes * PROBES + _FILLERS
        self.truth = Truth(self.key_count, generations=setting.processes == 1)
        self.layout = Layout("simulated", chunk_tokens=16, bytes_per_token=CHUNK_BYTES // 16)
        self.keys = [bytes([key % 3]) + b"%023d" % key for key in range(self.key_count)]  # few directories: they count
        self.machine = Machine(self.world, setting, self.wall_s)
        self.numbers_of_keys = {name: key for key, name in enumerate(self.keys)}
        self.weathers = self.machine.weathers
        self.disks: dict[str, Disk] = {}
        self._place_disks()
        self.places = {
            name: Place(disk, self._cap_bytes // (2 if name.startswith("disk2") else 1))
            for name, disk in self.disks.items()
            if name != "own"
        }
        self.weather_of = {disk: self.weathers[place_of(disk)] for disk in self.disks.values()}
        self._found_by = {disk: (self.weather_of[disk], self.places.get(name)) for name, disk in self.disks.items()}
        self._problem: BaseException | None = None
        self._calls = 0
        self.calls = FileCalls([*self.disks.values(), self.machine.memory.disk], self._before)
        self.machine.attach(self.calls, self.disks)
        self.server = (
            Server(self.weathers["remote"], setting.capacity_chunks, evicts=setting.server_evicts)
            if "remote" in setting.tiers
            else None
        )
        own = setting.fittings.own.partition(":")[0]
        if own:
            importlib.import_module(own)
        if setting.fittings.device_slots:
            importlib.import_module("torch")  # within the run it would keep simulated calls of `os` for good
        self.system = System(self.world, self.calls, self._stumble, [twin.__name__, *filter(None, [own])])
        self.director = Process(self.world, 1)
        self.nodes: dict[int, Node] = {}
        self.all_nodes: list[Node] = []
        self.numbers = 1
        self.begun: list[Operation] = []
        self.counts: Counter[str] = Counter()
        self.coverage = Coverage()
        self.trace: list[str] = []
        self.hash = xxhash.xxh3_64()
        self.last_fault_s = self.world.now_s - 1e6
        self._last_failure_s = self.last_fault_s
        self._violation: Violation | None = None
        self.over = False
        self.somebody_died = False
        self.share = 1.0
        """Of the caps that tiers on files have at their start, those that they have now."""
        if self.server is not None:
            self.server.on_delete = self._delete

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In the place of the system's, for as long as the run lasts."""
        if self.server is not None:
            remote.SERVERS[_URL] = self.server
        logger, handler = logging.getLogger("tiercache"), logging.Handler()
        handler.emit = self._logged  # type: ignore[method-assign]
        logger.addHandler(handler)
        making_room = changed(ChunkFiles, "_delete_any", self._noting(ChunkFiles._delete_any))
        try:
            with self.system.installed(), self.machine.installed(), making_room:
                yield
        finally:
            remote.SERVERS.pop(_URL, None)
            logger.removeHandler(handler)

    def _logged(self, record: logging.LogRecord) -> None:
        """Fail for an unexpected end of work in the background, of which only logs tell."""
        if record.exc_info:
            self.fail(Violation(f"{record.getMessage()}: {record.exc_info[1]!r}"))

    def _noting(self, delete_any: Callable[[ChunkFiles], bool]) -> Callable[[ChunkFiles], bool]:
        """A chunk that makes room for a tier's own files goes uncounted, as if others had deleted it."""

        def noted(files: ChunkFiles) -> bool:
            place = next(place for place in self.of_files if place.disk.owns(str(files.root)))
            before = place.look().chunks
            deleted = delete_any(files)
            gone = [self.numbers_of_keys[key] for key in before.keys() - place.look().chunks.keys()]
            for node in self.nodes.values():
                node.others_deleted(gone)
            return deleted

        return noted

    def _place_disks(self) -> None:
        for tier in self.setting.tiers:
            for name in disks_of(tier):
                self.disks[name] = Disk(
                    f"{ROOT}/{name}",
                    self.setting.capacity_chunks * FILE_BYTES + _BESIDE_BYTES,
                    self.wall_s,
                    can_lose_power=self.setting.power and tier not in ("hf3fs", MEMORY),  # no disks of this machine
                )

    def wall_s(self) -> float:
        return 1_700_000_000.0 + self.world.now_s + self.world.clock_error_s

    def failed(self) -> BaseException | None:
        if self._violation is not None:
            return self._violation
        for node in self.nodes.values():
            if node.failure is not None:
                return node.failure
        return self._problem

    def error_of_nobody(self) -> Violation | None:
        """Exceptions that nobody has looked at, of processes that were not killed: asyncio finds them with the garbage."""
        gc.collect(0)  # all that was made since the run began: nothing was collected meanwhile
        for node in self.all_nodes:
            for error in node.process.loop.errors if node.process.loop is not None else ():
                if "destroyed but it is pending" not in error["message"]:  # what hung when its cache was closed
                    return Violation(f"an error of nobody: {error['message']}: {error.get('exception')!r}")
        return None

    def note(self, line: str) -> None:
        if self.over:
            return
        text = f"{self.world.now_s:.6f} {self.world.steps} {line}"
        self.hash.update(text.encode())
        self.trace.append(text)

    def heard(self, number: int, line: str) -> None:
        self.note(f"{number}: {line}")
        node = self.nodes.get(number)
        if node is not None and node.state == "open" and self.faults():
            self.coverage.look(node.cache, self.disks.values())

    def _before(self, name: str, disk: Disk, target: object) -> object:
        strand = self.world.current
        if strand is None or (found := self._found_by.get(disk)) is None:
            return None
        weather, place = found
        if strand.process is self.director:
            self.fail(Violation(f"{name} {target}: a call of the director, who would wait with the mount"))
            return None
        if place is not None:
            loop = strand.process.loop
            if loop is not None and strand is loop.strand:
                self.fail(Violation(f"{name} {target}: a file is touched on the event loop"))
            self._calls += 1
            if not self._calls % _CALLS_A_LOOK:
                self._look_at(place)
        return weather.before(name, disk, target)

    def _look_at(self, place: Place) -> None:
        try:
            place.check(self.world.now_s)
        except Violation as error:
            self.fail(error)

    def fail(self, problem: Violation) -> None:
        self._problem = self._problem or problem
        self.world.stop()

    def _stumble(self) -> None:
        chance = self.world.chance.random()
        if chance < 0.3:
            self.world.pause(chance * 1e-4)

    def _delete(self, name: bytes, value: bytes, bad_answers: int) -> None:
        """A value of the remote server goes. One that was put since its key was forgotten last goes only where two reads,
        one after the other, got something else."""
        key = self.numbers_of_keys[name]
        ours = key < self.setting.keys and self.truth.generations  # else others forget it, or have not said so
        if bad_answers < 2 and ours and self.truth.is_newest(key, value[PACKED_BYTES:]):
            problem = f"key {key}: a good value is removed from the server, after {bad_answers} bad answers"
            self._violation = self._violation or Violation(problem)
            self.world.stop()

    @property
    def of_files(self) -> list[Place]:
        return list(self.places.values())

    def start(self, number: int, config: Config | None = None, no_threads_s: float = 0.0) -> None:
        self.numbers += 1
        process = Process(self.world, self.numbers, self._entered)
        process.on_death += [lambda: self.calls.die(process), lambda: self.machine.die(process)]
        node = Node(self, number, process, config or self.config(number))
        self.nodes[number] = node
        self.all_nodes.append(node)
        if no_threads_s:
            self.no_threads_of(process, no_threads_s)
        process.run(f"main {number}", node.main)

    async def resize_files(self, share: float) -> None:
        """Change the caps of all tiers on files to a share of what they were, in all processes."""
        for place in self.places.values():
            place.kept_from_s = float("inf") if share < 1.0 else 0.0  # faults stop evictions
            place.cap_bytes = int(place.cap_bytes * share / self.share)
        self.share = share
        for node in list(self.nodes.values()):
            if node.state == "open":
                await node.on_loop(functools.partial(node.calls.resize_files, share))

    def _entered(self, process: Process) -> None:
        self.calls.process = process

    def no_threads_of(self, process: Process, for_s: float) -> None:
        process.no_threads = True

        def again() -> None:
            process.no_threads = False

        self.world.at(self.world.now_s + for_s, again)
        self.happened(fails=True)

    def die(self, node: Node) -> None:
        self.somebody_died = True
        node.process.die()
        self.happened()
        if self.setting.processes == 1:
            self.truth.memory_is_lost()

    async def close(self, number: int, timeout_s: float | None, cancel_s: float | None = None) -> None:
        node = self.nodes[number]
        await self.started(node)
        assert node.process.loop is not None
        if node.state == "open":
            node.process.loop.call_soon_threadsafe(node.stop, timeout_s, cancel_s)
        began_s = self.world.now_s
        while node.state not in ("closed", "failed"):
            await asyncio.sleep(0.01)
            if self.world.now_s - began_s > 120:
                raise Violation(f"process {number} does not end: {node.state}")
        await asyncio.sleep(_ENDED_S)
        self._check_ended(node)
        if self.setting.processes == 1:
            self.truth.memory_is_lost()

    async def started(self, node: Node) -> None:
        for _ in range(20_000):
            if node.state != "starting":
                return
            await asyncio.sleep(0.01)
        raise Violation("a cache neither starts nor fails to")

    def _check_ended(self, node: Node) -> None:
        """What a closed cache leaves behind, where nothing hangs: nothing."""
        loop = node.process.loop
        assert loop is not None
        if self.faults():
            self.somebody_died = True
            node.process.die()
            loop.is_dead = False  # what ends as garbage is still an error of nobody
            return
        strands = [s.name for s in self.world.strands if s.process is node.process and s is not loop.strand]
        problems = {
            "threads": [name for name in strands if not name.startswith(twin.STREAM_THREAD)],  # those are the accelerator's
            "descriptors": self.calls.descriptors_of(node.process),
            # What hung made a start fail, and its loop has not run since.
            "tasks and timers": [] if node.state == "failed" else loop.left(),
            "errors of nobody": loop.errors,
            **self.machine.left_by(node.process),
        }
        left = {name: found for name, found in problems.items() if found}
        if left:
            raise Violation(f"a closed cache left behind: {left}")

    @property
    def _cap_bytes(self) -> int:
        """Of each tier on files."""
        return int(self.setting.options.get("max_local_disk_size", cap_bytes(24, 1) / 2**30) * 2**30)

    def config(self, number: int, *, share: float = 1.0, servers: bool = True, directories: int = 2) -> Config:
        """`share`: of the cap. `directories`: how many of those of one tier are used, each with the same cap as ever."""
        setting = self.setting
        values = {"chunk_size": 16, "max_local_cpu_size": setting.slots * CHUNK_BYTES / 2**30, **setting.options}
        values |= self.machine.config(self.disks, number)
        cap = self._cap_bytes * share / 2**30
        places = [f"{disk.root}/kv" for name, disk in self.disks.items() if name.startswith("disk")]
        if places:
            used = places[:directories]
            values["max_local_disk_size"] = cap * len(used) / len(places)
            values |= {"local_disk": ",".join(used), "local_disk_path_sharding": "by_chunk"}
        plugins = values.pop("remote_storage_plugins", "").split()
        if "remote" in setting.tiers and servers:
            plugins.append("simulated")
            values |= {
                "remote_storage_plugin.simulated.url": _URL,
                "remote_storage_plugin.simulated.module_path": "tests.torture.simulation.remote",
                "remote_storage_plugin.simulated.class_name": "SimulatedRemote",
                "remote_storage_plugin.simulated.timeout_s": 1.0,
            }
        if "fs" in setting.tiers:
            plugins.append("fs")
            values |= {
                "remote_storage_plugin.fs.base_path": f"{self.disks['fs'].root}/kv",
                "remote_storage_plugin.fs.max_size": cap,
            }
        if {"gds", "weka"} & set(setting.tiers):
            values["max_gds_size"] = cap
        if "hf3fs" in setting.tiers:
            values["max_hf3fs_size"] = cap
        if MEMORY in setting.tiers:
            values |= {"shared_memory_path": f"{self.disks[MEMORY].root}/kv", "max_shared_memory_size": cap}
        if plugins:
            values["remote_storage_plugins"] = ",".join(plugins)
        return _loaded(tuple(values.items()))

    def faults(self) -> bool:
        now_s = self.world.now_s
        gone = [name for name, place in self.places.items() if place.is_gone and self._is_used(name)]
        if now_s - self.last_fault_s < _RECENT_S or gone:
            return True
        if any(node.is_open and self.machine.is_behind(node.process) for node in self.nodes.values()):
            return True
        return any(not weather.calm or now_s - weather.last_fault_s < _RECENT_S for weather in self.weathers.values())

    def _is_used(self, name: str) -> bool:
        """Return False for a second directory that no cache has in its configuration: it is not made anew."""
        return name != "disk2b" or any(node.calls.reaches_all for node in self.nodes.values())

    def start_may_fail(self) -> bool:
        """A device that is merely full is no reason, nor are those who died or what they left."""
        now_s = self.world.now_s
        if len(self.places) < len(self.disks):
            return self.faults()
        if any(w.fails or now_s - w.last_failure_s < _RECENT_S for w in self.weathers.values()):
            return True
        return now_s - self._last_failure_s < _RECENT_S or not all(place.is_set_up for place in self.places.values())

    def happened(self, *, fails: bool = False) -> None:
        """`fails`: a cache may fail to start for it."""
        self.last_fault_s = self.world.now_s
        if fails:
            self._last_failure_s = self.world.now_s


@functools.lru_cache(64)
def _loaded(values: tuple[tuple[str, Any], ...]) -> Config:
    return Config.load(environ={}, overrides=dict(values))
