"""One seed from its beginning to its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import logging
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from tiercache.config import Config
from tiercache.core.header import PACKED_BYTES
from tiercache.core.layout import Layout
from tiercache.testing.simulation import remote
from tiercache.testing.simulation.aftermath import check_fills, check_promises, check_reopened, check_shelves, scans_end
from tiercache.testing.simulation.coverage import Coverage
from tiercache.testing.simulation.files import Disk, FileCalls
from tiercache.testing.simulation.machine import Machine, disks_of, place_of
from tiercache.testing.simulation.node import Node
from tiercache.testing.simulation.oracle import Truth, Violation
from tiercache.testing.simulation.places import Place
from tiercache.testing.simulation.plan import (
    CHUNK_BYTES,
    FILE_BYTES,
    Operation,
    Setting,
    cap_bytes,
    operations_of,
    setting_of,
)
from tiercache.testing.simulation.process import Process
from tiercache.testing.simulation.remote import Server
from tiercache.testing.simulation.system import ROOT, System
from tiercache.testing.simulation.weather import Weather
from tiercache.testing.simulation.world import World

_URL = "simulated://server"
_AT_ONCE = 8
"""Callers of one process at a time."""
_WORKS_AGAIN_S = 70.0
"""How long after the last fault everything has to work again: a breaker's longest pause (60 s), two for a scan that a write
waits for, and what a round of questions takes."""
_PROBES = 200
"""Keys that are put to see whether it does."""
_REFRESHED_S = 5.0
"""When every process knows of what others stored and removed in a shared directory that is listed every second."""
_FILLERS = 260
"""Keys that are put to fill directories, and more than fit."""
_BESIDE_BYTES = 32 * 4096
"""On each device, for what is not a chunk."""
_CALLS_A_LOOK = 32
_RECENT_S = 130.0
_TRACE_LINES = 4000
_COLLECTIONS = 10
"""At the most: what comes back to life while it is collected, as a coroutine with a `finally` does, needs another."""
_LONGEST_S = 50_000.0
"""What no run takes, of its own time: those of 300 operations take 1,000 s."""


@dataclass
class Outcome:
    """What became of a seed."""

    seed: int
    setting: Setting
    operations: list[Operation]
    failure: BaseException | None
    """Without the frames in which it was raised: they would keep all of the run."""
    digest: str
    """Equal for equal runs."""
    steps: int
    virtual_s: float
    counts: Counter[str] = field(default_factory=Counter)
    """Operations by what became of them, and faults that were met."""
    trace: list[str] = field(default_factory=list)
    """The last lines of what happened."""
    said: str = ""
    """The failure, and the innermost lines where it was raised."""

    @property
    def chunks(self) -> int:
        """Operations, counted for each chunk."""
        return sum(max(1, len(operation.keys)) for operation in self.operations)


def run_seed(
    seed: int,
    operations: Sequence[Operation] | None = None,
    *,
    setting: Setting | None = None,
    count: int = 300,
    told: Sequence[Exception] = (),
) -> Outcome:
    """Run a seed, with its own operations or with others.

    `told` fills with what a signal raises in it while it runs: whatever comes of that, the first of them is its failure.
    """
    setting = setting or setting_of(seed)
    operations = operations_of(seed, setting, count) if operations is None else list(operations)
    with _quiet() as warned:
        run = _Run(seed, setting, operations)
        outcome = run.outcome()
        nobody_died = not run.somebody_died
        if told:
            outcome.failure = told[0]
        if outcome.failure is not None:
            outcome.said = _text_of(outcome.failure)
        for failure in (outcome.failure, *told):
            _let_go_of_frames(failure)
        del run
        for _ in range(_COLLECTIONS):
            if not gc.collect():
                break
    if warned and nobody_died and outcome.failure is None:
        said = "; ".join(dict.fromkeys(str(each.message) for each in warned))
        outcome.failure = Violation(f"nobody died, and when all was gone Python said: {said}")
        outcome.said = _text_of(outcome.failure)
    return outcome


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """No logs, no collection of garbage at a random moment, and warnings only for us: the dead leave leases and coroutines.

    What was there before is no garbage, and is not looked at.
    """
    disabled = logging.root.manager.disable
    collected = gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.disable()
    gc.freeze()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield warned
    finally:
        gc.unfreeze()
        logging.disable(disabled)
        if collected:
            gc.enable()


def _text_of(failure: BaseException) -> str:
    return "".join(traceback.format_exception(failure, limit=-6)).rstrip()


def _let_go_of_frames(failure: BaseException | None) -> None:
    """Even one that is cleared keeps its function, and with that what the function has closed over."""
    errors: list[BaseException | None] = [failure]
    for error in errors:
        if error is not None:
            error.__traceback__ = None
            behind = (error.__cause__, error.__context__, *getattr(error, "exceptions", ()))
            errors += [one for one in behind if one not in errors]


class _Run:
    def __init__(self, seed: int, setting: Setting, operations: list[Operation]) -> None:
        self.seed = seed
        self.setting = setting
        self.operations = operations
        self.world = World(seed)
        self.world.ends_s = self.world.now_s + _LONGEST_S
        self._key_count = setting.keys + setting.processes * _PROBES + _FILLERS
        self.truth = Truth(self._key_count, generations=setting.processes == 1)
        self.layout = Layout("simulated", chunk_tokens=16, bytes_per_token=CHUNK_BYTES // 16)
        self.keys = [bytes([key % 3]) + b"%023d" % key for key in range(self._key_count)]  # few directories: they count
        self.machine = Machine(self.world, setting, self._wall_s)
        self._numbers = {name: key for key, name in enumerate(self.keys)}
        self.weathers = self.machine.weathers
        self.disks: dict[str, Disk] = {}
        self._weather_of: dict[Disk, Weather] = {}
        self._place_disks()
        self.places = {
            name: Place(disk, self._cap_bytes // (2 if name.startswith("disk2") else 1))
            for name, disk in self.disks.items()
            if name != "own"
        }
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
        self.system = System(self.world, self.calls, self._stumble, [own] if own else [])
        self._director: Process | None = None
        self.nodes: dict[int, Node] = {}
        self.all_nodes: list[Node] = []
        self.numbers = 1
        self.counts: Counter[str] = Counter()
        self.coverage = Coverage()
        self.trace: list[str] = []
        self._hash = xxhash.xxh3_64()
        self._last_fault_s = self.world.now_s - 1e6
        self._last_failure_s = self._last_fault_s
        self._violation: Violation | None = None
        self._over = False
        self.somebody_died = False

        if self.server is not None:
            self.server.on_delete = self._delete

    def _place_disks(self) -> None:
        for tier in self.setting.tiers:
            for name in disks_of(tier):
                self.disks[name] = disk = Disk(
                    f"{ROOT}/{name}",
                    self.setting.capacity_chunks * FILE_BYTES + _BESIDE_BYTES,
                    self._wall_s,
                    can_lose_power=self.setting.power and tier != "hf3fs",  # it is no disk of this machine
                )
                self._weather_of[disk] = self.weathers[place_of(disk)]

    def _wall_s(self) -> float:
        return 1_700_000_000.0 + self.world.now_s + self.world.clock_error_s

    def outcome(self) -> Outcome:
        failure: BaseException | None = None
        if self.server is not None:
            remote.SERVERS[_URL] = self.server
        try:
            with self.system.installed(), self.machine.installed():
                self._director = Process(self.world, 1)
                self._director.run("director", self._direct)
                try:
                    self.world.run()
                    failure = self._failed() or self._nobodys()
                except Exception as error:
                    failure = self._failed() or error
                finally:
                    self._over = True
                    self.world.end()
        finally:
            remote.SERVERS.pop(_URL, None)
        for weather in self.weathers.values():
            self.counts.update({f"fault {weather.name.rstrip('2')} {kind}": met for kind, met in weather.met.items()})
        for node in self.all_nodes:
            self.counts.update(node.counts)
            self.coverage.end(node.cache)
        self.counts.update({f"state {name}": count for name, count in self.coverage.states.items()})
        return Outcome(
            self.seed,
            self.setting,
            self.operations,
            failure,
            self._hash.hexdigest(),
            self.world.steps,
            self.world.now_s,
            self.counts,
            self.trace[-_TRACE_LINES:],
        )

    def _failed(self) -> BaseException | None:
        if self._violation is not None:
            return self._violation
        for node in self.nodes.values():
            if node.failure is not None:
                return node.failure
        return self._problem

    def _nobodys(self) -> Violation | None:
        """Exceptions that nobody has looked at, of processes that were not killed: asyncio finds them with the garbage."""
        gc.collect(0)  # all that was made since the run began: nothing was collected meanwhile
        for node in self.all_nodes:
            for error in node.process.loop.errors if node.process.loop is not None else ():
                if "destroyed but it is pending" not in error["message"]:  # what hung when its cache was closed
                    return Violation(f"an error of nobody: {error['message']}: {error.get('exception')!r}")
        return None

    def note(self, line: str) -> None:
        if self._over:
            return
        text = f"{self.world.now_s:.6f} {self.world.steps} {line}"
        self._hash.update(text.encode())
        self.trace.append(text)

    def _heard(self, number: int, line: str) -> None:
        self.note(f"{number}: {line}")
        node = self.nodes.get(number)
        if node is not None and node.state == "open" and self._faults():
            self.coverage.look(node.cache, self.disks.values())

    # What the system meets

    def _before(self, name: str, disk: Disk, target: object) -> object:
        strand = self.world.current
        if strand is None or (weather := self._weather_of.get(disk)) is None:
            return None
        if strand.process is self._director:
            self._found(Violation(f"{name} {target}: a call of the director, who would wait with the mount"))
            return None
        place = self.places.get(disk.root.rpartition("/")[2])
        if place is not None:
            loop = strand.process.loop
            if loop is not None and strand is loop.strand:
                self._found(Violation(f"{name} {target}: a file is touched on the event loop"))
            self._calls += 1
            if not self._calls % _CALLS_A_LOOK:
                self._look_at(place)
        return weather.before(name, disk, target)

    def _look_at(self, place: Place) -> None:
        now_s = self.world.now_s
        fault_s = max(self._last_fault_s, *(weather.last_fault_s for weather in self.weathers.values()))
        if not all(weather.calm for weather in self.weathers.values()):
            fault_s = now_s
        try:
            place.check(now_s, fault_s)
        except Violation as error:
            self._found(error)

    def _found(self, problem: Violation) -> None:
        self._problem = self._problem or problem
        self.world.stop()

    def _stumble(self) -> None:
        chance = self.world.chance.random()
        if chance < 0.3:
            self.world.pause(chance * 1e-4)

    def _delete(self, name: bytes, value: bytes, bad_answers: int) -> None:
        """A value of the remote server goes. One that was put since its key was forgotten last goes only where two reads,
        one after the other, got something else."""
        key = self._numbers[name]
        ours = key < self.setting.keys and self.truth.generations  # else others forget it, or have not said so
        if bad_answers < 2 and ours and self.truth.is_newest(key, value[PACKED_BYTES:]):
            problem = f"key {key}: a good value is removed from the server, after {bad_answers} bad answers"
            self._violation = self._violation or Violation(problem)
            self.world.stop()

    # The director: a process of its own that never dies

    async def _direct(self) -> None:
        for number in range(self.setting.processes):
            self._start(number)
        for operation in self.operations:
            await asyncio.sleep(operation.after_s)
            happens = getattr(self, f"_{operation.kind}", None)
            if happens is not None:
                self.note(str(operation))
                self.counts[operation.kind] += 1
                await happens(operation)
            else:
                await self._ask(operation)
        await self._settle()
        self.world.stop()

    async def _ask(self, operation: Operation) -> None:
        node = self.nodes[operation.process]
        waited_s = 0.0
        while node.state == "starting" or node.running >= _AT_ONCE:
            await asyncio.sleep(0.001 + waited_s)
            waited_s += 0.001
            if waited_s > 0.1:
                return
        if node.state == "open":
            assert node.process.loop is not None
            node.process.loop.call_soon_threadsafe(node.begin, operation)
            await asyncio.sleep(0)

    def _start(self, number: int, config: Config | None = None, no_threads_s: float = 0.0) -> None:
        self.numbers += 1
        process = Process(self.world, self.numbers, self._entered)
        process.on_death += [lambda: self.calls.die(process), lambda: self.machine.die(process)]
        node = Node(
            process, config or self._config(number), self.layout, self.truth, self.keys,
            lambda line: self._heard(number, line), faults=self._faults, start_may_fail=self._start_may_fail,
            machine=self.machine,
            server=self.server, tiers=self.setting.tiers, alone=self.setting.processes == 1, prefix=self.setting.prefix,
        )  # fmt: skip
        self.nodes[number] = node
        self.all_nodes.append(node)
        if no_threads_s:
            self._no_threads_of(process, no_threads_s)
        process.run(f"main {number}", node.main)

    def _entered(self, process: Process) -> None:
        self.calls.process = process

    @property
    def _cap_bytes(self) -> int:
        """Of each tier on files."""
        return int(self.setting.options.get("max_local_disk_size", cap_bytes(24, 1) / 2**30) * 2**30)

    def _config(self, number: int, *, share: float = 1.0, servers: bool = True, directories: int = 2) -> Config:
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
                "remote_storage_plugin.simulated.module_path": "tiercache.testing.simulation.remote",
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
        if plugins:
            values["remote_storage_plugins"] = ",".join(plugins)
        return Config.load(environ={}, overrides=values)

    def _faults(self) -> bool:
        now_s = self.world.now_s
        if now_s - self._last_fault_s < _RECENT_S:
            return True
        return any(not weather.calm or now_s - weather.last_fault_s < _RECENT_S for weather in self.weathers.values())

    def _start_may_fail(self) -> bool:
        """A device that is merely full is no reason, nor are those who died or what they left."""
        now_s = self.world.now_s
        if len(self.places) < len(self.disks):
            return self._faults()
        if any(w.fails or now_s - w.last_failure_s < _RECENT_S for w in self.weathers.values()):
            return True
        return now_s - self._last_failure_s < _RECENT_S or not all(place.is_set_up for place in self.places.values())

    def _happened(self, *, fails: bool = False) -> None:
        """`fails`: a cache may fail to start for it."""
        self._last_fault_s = self.world.now_s
        if fails:
            self._last_failure_s = self.world.now_s

    # What happens

    async def _fault(self, operation: Operation) -> None:
        if "place" in operation.values:
            self.weathers[operation.values["place"]].turn(operation.values["fault"], operation.values["rate"])

    async def _clear(self, operation: Operation) -> None:
        if "place" in operation.values:
            self.weathers[operation.values["place"]].clear()

    async def _litter(self, operation: Operation) -> None:
        """Somebody else fills the device, or takes his file away again."""
        for disk in self.disks.values():
            disk.occupy(operation.values["chunks"] * FILE_BYTES)
        self._happened()

    async def _empty(self, operation: Operation) -> None:
        """rm -rf DIR/* beside running caches, or rm -rf DIR."""
        for disk in self.disks.values():
            disk.remove_all(f"{disk.root}/kv")
            if operation.values.get("itself") and (directory := disk.top.names.get("kv")) is not None:
                disk.remove(disk.top, "kv", directory)
        self._others_deleted(range(self._key_count))
        self._happened(fails=True)
        self.truth.memory_is_lost()

    async def _wipe(self, operation: Operation) -> None:
        """Somebody deletes our bookkeeping beside running caches."""
        for place in self._of_files:
            disk, name = place.disk, operation.values["name"]
            with contextlib.suppress(OSError):
                directory = disk.find_directory(f"{disk.root}/kv/.tiercache")
                if name in directory.names and name == "ledger":
                    disk.remove(directory, name, directory.names[name])
                elif name != "ledger":
                    disk.remove_all(f"{disk.root}/kv/.tiercache/{name}".rstrip("/"))
        self._happened(fails=True)

    async def _prune(self, operation: Operation) -> None:
        """Somebody deletes chunks beside running caches."""
        for place in self._of_files:
            disk = place.disk
            for key in place.look().chunks:
                if self.world.chance.random() < operation.values["share"]:
                    directory = disk.find_directory(f"{disk.root}/kv/{key.hex()[:2]}")
                    disk.remove(directory, key.hex(), directory.names[key.hex()])
                    self._others_deleted([self._numbers[key]])
        self._happened()

    def _others_deleted(self, keys: Iterable[int]) -> None:
        for node in self.nodes.values():
            node.others_deleted(keys)

    async def _spoil(self, operation: Operation) -> None:
        """Files can be read no more."""
        for place in self._of_files:
            spoilt = self._weather_of[place.disk].spoilt
            for file in place.look().chunks.values():
                if self.world.chance.random() < operation.values["share"]:
                    spoilt.add((place.disk.root, file.number))
        self._happened()

    async def _clock(self, operation: Operation) -> None:
        """A wall clock is set."""
        self.world.clock_error_s += operation.values["by_s"]

    async def _no_threads(self, operation: Operation) -> None:
        self._no_threads_of(self.nodes[operation.process].process, operation.values["for_s"])

    def _no_threads_of(self, process: Process, for_s: float) -> None:
        process.no_threads = True

        def again() -> None:
            process.no_threads = False

        self.world.at(self.world.now_s + for_s, again)
        self._happened(fails=True)

    async def _kill(self, operation: Operation) -> None:
        node = self.nodes[operation.process]
        self._die(node)
        await asyncio.sleep(operation.values["away_s"])
        self._start(operation.process, no_threads_s=operation.values["no_threads_s"])

    async def _rest(self, operation: Operation) -> None:
        """Nobody comes for a while, or for longer than what hangs is waited for."""
        await asyncio.sleep(operation.values["for_s"])

    def _die(self, node: Node) -> None:
        self.somebody_died = True
        node.process.die()
        self._happened()
        if self.setting.processes == 1:
            self.truth.memory_is_lost()

    async def _power(self, operation: Operation) -> None:
        for node in self.nodes.values():
            self._die(node)
        for disk in self.disks.values():
            if disk.can_lose_power:
                disk.cut_power(self.world.chance)
        self.machine.cut_power()
        for place in self.places.values():
            place.is_certain = False
        self._happened(fails=True)
        self.truth.power_was_cut()
        for number in range(self.setting.processes):
            self._start(number)

    async def _reopen(self, operation: Operation) -> None:
        values = operation.values
        await self._close(operation.process, values["timeout_s"], values.get("cancel_s"))
        await asyncio.sleep(values["away_s"])
        directories = values.get("directories", 2)
        config = self._config(operation.process, directories=directories)
        self._start(operation.process, config, values["no_threads_s"])
        self.nodes[operation.process].reaches_all = directories > 1

    async def _close(self, number: int, timeout_s: float | None, cancel_s: float | None = None) -> None:
        node = self.nodes[number]
        await self._started(node)
        assert node.process.loop is not None
        if node.state == "open":
            node.process.loop.call_soon_threadsafe(node.stop, timeout_s, cancel_s)
        began_s = self.world.now_s
        while node.state not in ("closed", "failed"):
            await asyncio.sleep(0.01)
            if self.world.now_s - began_s > 120:
                raise Violation(f"process {number} does not end: {node.state}")
        self._check_ended(node)
        if self.setting.processes == 1:
            self.truth.memory_is_lost()

    async def _started(self, node: Node) -> None:
        for _ in range(20_000):
            if node.state != "starting":
                return
            await asyncio.sleep(0.01)
        raise Violation("a cache neither starts nor fails to")

    def _check_ended(self, node: Node) -> None:
        """What a closed cache leaves behind, where nothing hangs: nothing."""
        loop = node.process.loop
        assert loop is not None
        if self._faults():
            self.somebody_died = True
            node.process.die()
            loop.is_dead = False  # what ends as garbage is still an error of nobody
            return
        strands = [s.name for s in self.world.strands if s.process is node.process and s is not loop.strand]
        problems = {
            "threads": strands,
            "descriptors": self.calls.descriptors_of(node.process),
            "errors of nobody": loop.errors,
            **self.machine.left_by(node.process),
        }
        left = {name: found for name, found in problems.items() if found}
        if left:
            raise Violation(f"a closed cache left behind: {left}")

    async def _settle(self) -> None:
        """All faults end. Everything works again, and nothing is left under way."""
        for weather in self.weathers.values():
            weather.clear()
        for disk in self.disks.values():
            disk.occupy(0)
        if self.server is not None:
            self.server.evicts = True  # a server that stays full takes nothing
        for node in self.nodes.values():
            node.process.no_threads = False
        for number, node in list(self.nodes.items()):
            await self._started(node)
            if node.state == "open" and self.machine.is_broken_for(node.process, node.cache):
                await self._close(number, 1.0)
                self.somebody_died = True
                node.process.die()
                self._start(number)
                await asyncio.sleep(5.0)
            elif node.state == "failed":
                node.process.die()
                self._start(number)
                await asyncio.sleep(5.0)
        for number, node in self.nodes.items():
            if node.state != "open":
                raise Violation(f"process {number} is {node.state} though nothing fails")
            first = self.setting.keys + number * _PROBES
            await node.on_loop(functools.partial(node.works_again, _WORKS_AGAIN_S, first))
        if self.places:
            await self._owed_by_files()
        while self._faults():  # noqa: ASYNC110 - nobody tells when what happened is no longer recent
            await asyncio.sleep(1.0)
        faultless = self._last_fault_s < 0 and all(weather.faultless for weather in self.weathers.values())
        if {"fs", "weka"} & set(self.places):
            await asyncio.sleep(_REFRESHED_S)
        for node in self.nodes.values():
            await node.on_loop(functools.partial(scans_end, node))
        for node in self.nodes.values():
            check_shelves(node, self._of_files, faultless=faultless, alone=len(self.nodes) == 1)
        for number in self.nodes:
            await self._close(number, 5.0)
        if self.places:
            await self._reopened()

    @property
    def _of_files(self) -> list[Place]:
        return list(self.places.values())

    async def _owed_by_files(self) -> None:
        nodes = list(self.nodes.values())
        first = self.setting.keys + self.setting.processes * _PROBES
        await check_promises(nodes[0], nodes[1:], self._of_files, first)
        cap_bytes = max(place.cap_bytes for place in self._of_files) * len(self.places)
        await check_fills(nodes[-1], self._of_files, range(first + 1, first + 2 + cap_bytes // FILE_BYTES))

    async def _reopened(self) -> None:
        """A last process finds what the others have left."""
        lowered = self.seed % 4 == 3
        if lowered:
            for place in self._of_files:
                place.cap_bytes //= 2
                place.kept_from_s = float("inf")
        self._start(0, self._config(0, share=0.5 if lowered else 1.0, servers=False))
        node = self.nodes[0]
        await self._started(node)
        if node.state != "open":
            raise Violation("a last process does not start")
        names = {name: number for number, name in enumerate(self.keys)}
        spoilt = set().union(*(weather.spoilt for weather in self.weathers.values()))
        await node.on_loop(functools.partial(check_reopened, node, self._of_files, names, spoilt))
        await self._close(0, 5.0)
        for place in self._of_files:
            place.check_left(self.keys, self._wall_s())
