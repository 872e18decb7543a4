"""What happens to simulated processes, machines and directories besides what callers ask for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from tests.torture.simulation.fittings import MEMORY
from tests.torture.simulation.machine import place_of
from tests.torture.simulation.plan import FILE_BYTES, Operation
from tests.torture.simulation.stage import Stage
from tiercache.tiers.files.directory import SUBDIRECTORY


class Happenings:
    """One method for each kind."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def fault(self, operation: Operation) -> None:
        if "place" in operation.values:
            self.stage.weathers[operation.values["place"]].turn(operation.values["fault"], operation.values["rate"])

    async def clear(self, operation: Operation) -> None:
        if "place" in operation.values:
            self.stage.weathers[operation.values["place"]].clear()

    async def litter(self, operation: Operation) -> None:
        """Let another program fill the device, or remove its file again."""
        for disk in self.stage.disks.values():
            disk.occupy(operation.values["chunks"] * FILE_BYTES)
        self.stage.happened()

    async def empty(self, operation: Operation) -> None:
        """rm -rf DIR/* beside running caches, or rm -rf DIR."""
        for disk in self.stage.disks.values():
            disk.remove_all(f"{disk.root}/kv")
            if operation.values.get("itself") and (directory := disk.top.names.get("kv")) is not None:
                disk.remove(disk.top, "kv", directory)
        self._others_deleted(range(self.stage.key_count))
        self.stage.happened(fails=True)
        self.stage.truth.memory_is_lost()

    async def wipe(self, operation: Operation) -> None:
        """Delete our bookkeeping beside running caches."""
        for place in self.stage.of_files:
            disk, name = place.disk, operation.values["name"]
            with contextlib.suppress(OSError):
                directory = disk.find_directory(f"{disk.root}/kv/{SUBDIRECTORY}/.tiercache")
                if name in directory.names and name == "ledger":
                    disk.remove(directory, name, directory.names[name])
                elif name != "ledger":
                    disk.remove_all(f"{disk.root}/kv/{SUBDIRECTORY}/.tiercache/{name}".rstrip("/"))
        self.stage.happened(fails=True)

    async def prune(self, operation: Operation) -> None:
        """Delete chunks beside running caches."""
        for place in self.stage.of_files:
            found = place.look()
            for key in found.chunks:
                if self.stage.world.chance.random() < operation.values["share"]:
                    name = key.hex()
                    directory = next(each for each in found.directories if name in each.names)
                    place.disk.remove(directory, name, directory.names[name])
                    self._others_deleted([self.stage.numbers_of_keys[key]])
        self.stage.happened()

    def _others_deleted(self, keys: Iterable[int]) -> None:
        for node in self.stage.nodes.values():
            node.others_deleted(keys)

    async def spoil(self, operation: Operation) -> None:
        """Files can be read no more, but for those in memory."""
        for place in [each for each in self.stage.of_files if place_of(each.disk) != MEMORY]:
            spoilt = self.stage.weather_of[place.disk].spoilt
            for file in place.look().chunks.values():
                if self.stage.world.chance.random() < operation.values["share"]:
                    spoilt.add((place.disk.root, file.number))
        self.stage.happened()

    async def clock(self, operation: Operation) -> None:
        """A wall clock is set."""
        self.stage.world.clock_error_s += operation.values["by_s"]

    async def no_threads(self, operation: Operation) -> None:
        self.stage.no_threads_of(self.stage.nodes[operation.process].process, operation.values["for_s"])

    async def kill(self, operation: Operation) -> None:
        node = self.stage.nodes[operation.process]
        self.stage.die(node)
        await asyncio.sleep(operation.values["away_s"])
        self.stage.start(operation.process, no_threads_s=operation.values["no_threads_s"])

    async def resize_files(self, operation: Operation) -> None:
        """All caps change, in all processes."""
        await self.stage.resize_files(operation.values["share"])

    async def rest(self, operation: Operation) -> None:
        """Nobody comes for a while, or for longer than what hangs is waited for."""
        await asyncio.sleep(operation.values["for_s"])

    async def power(self, operation: Operation) -> None:
        for node in self.stage.nodes.values():
            self.stage.die(node)
        for disk in self.stage.disks.values():
            if disk.can_lose_power:
                disk.cut_power(self.stage.world.chance)
            elif place_of(disk) == MEMORY:
                disk.remove_all(disk.root)
        self.stage.machine.cut_power()
        for place in self.stage.places.values():
            place.is_certain = False
        self.stage.happened(fails=True)
        self.stage.truth.power_was_cut()
        for number in range(self.stage.setting.processes):
            self.stage.start(number)

    async def reopen(self, operation: Operation) -> None:
        values = operation.values
        await self.stage.close(operation.process, values["timeout_s"], values.get("cancel_s"))
        await asyncio.sleep(values["away_s"])
        directories = values.get("directories", 2)
        config = self.stage.config(operation.process, directories=directories)
        self.stage.start(operation.process, config, values["no_threads_s"])
        self.stage.nodes[operation.process].calls.reaches_all = directories > 1
