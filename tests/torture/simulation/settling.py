"""The end of a run: all faults end, everything works again, and nothing is left under way."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter

from tests.torture.simulation.aftermath import (
    check_directories,
    check_fills,
    check_promises,
    check_reopened,
    directories,
    scans_end,
)
from tests.torture.simulation.machine import place_of
from tests.torture.simulation.oracle import Violation
from tests.torture.simulation.plan import FILE_BYTES
from tests.torture.simulation.stage import PROBES, Stage
from tests.torture.simulation.works_again import works_again
from tiercache.tiers.files.tier import FileTier

_WORKS_AGAIN_S = 70.0
"""How long after the last fault everything has to work again: a breaker's longest pause (60 s), two for a scan that a write
waits for, and what a round of questions takes."""
_LATE_S = 30.0
"""The longest pause between two attempts to open a tier whose mount is away; a breaker may probe just before it opens."""
_REFRESHED_S = 5.0
"""When every process knows of what others stored and removed in a shared directory that is listed every second."""


async def _restart(stage: Stage, number: int) -> None:
    await stage.close(number, 1.0)
    stage.somebody_died = True
    stage.nodes[number].process.die()
    stage.start(number)
    await asyncio.sleep(5.0)


async def settle(stage: Stage) -> None:
    """All faults end. Everything works again, and nothing is left under way."""
    for weather in stage.weathers.values():
        weather.clear()
    for disk in stage.disks.values():
        disk.occupy(0)
    if stage.server is not None:
        stage.server.evicts = True  # a server that stays full takes nothing
    for node in stage.nodes.values():
        node.process.no_threads = False
    for number, node in list(stage.nodes.items()):
        await stage.started(node)
        if node.state == "open" and stage.machine.is_broken_for(node.process, node.cache):
            await _restart(stage, number)
        elif node.state == "failed":
            node.process.die()
            stage.start(number)
            await asyncio.sleep(5.0)
    for number, node in stage.nodes.items():
        if node.state != "open":
            raise Violation(f"process {number} is {node.state} though nothing fails")
        await node.on_loop(functools.partial(node.settle, stage.share))
        first = stage.setting.keys + number * PROBES
        opens_late = any(isinstance(tier, FileTier) and tier._late_s is not None for tier in node.cache.tiers)
        within_s = _WORKS_AGAIN_S + (_LATE_S if opens_late else 0.0)
        await node.on_loop(functools.partial(works_again, node, within_s, first))
    if stage.places:
        await _owed_by_files(stage)
        roots = [str(directory.files.root) for node in stage.nodes.values() for directory in directories(node.cache)]
        for place in stage.of_files:
            if any(map(place.disk.owns, roots)):  # no process evicts from a directory that none is configured with
                place.kept_from_s = 0.0
                place.check(stage.world.now_s)
    while stage.faults():
        await asyncio.sleep(1.0)
    faultless = stage.last_fault_s < 0 and all(weather.faultless for weather in stage.weathers.values())
    if {"fs", "weka"} & set(stage.places):
        await asyncio.sleep(_REFRESHED_S)
    for node in stage.nodes.values():
        await node.on_loop(functools.partial(scans_end, node))
    for node in stage.nodes.values():
        check_directories(node, stage.of_files, faultless=faultless, alone=len(stage.nodes) == 1)
    for number in stage.nodes:
        await stage.close(number, 5.0)
    if stage.places:
        await _reopened(stage)


async def _owed_by_files(stage: Stage) -> None:
    nodes = list(stage.nodes.values())
    first = stage.setting.keys + stage.setting.processes * PROBES
    await check_promises(nodes[0], nodes[1:], stage.of_files, first)
    caps_bytes: Counter[str] = Counter()
    for place in stage.of_files:
        caps_bytes[place_of(place.disk)] += place.cap_bytes  # of two directories of a tier, each gets a part
    most = int(max(caps_bytes.values()) / stage.share) // FILE_BYTES
    if len(caps_bytes) < len(stage.of_files):
        most *= 2  # few keys are spread unevenly over two directories, so twice as many as there is room for fill both
    await check_fills(nodes[-1], stage.of_files, range(first + 1, first + 2 + most))


async def _reopened(stage: Stage) -> None:
    """A last process finds what the others have left."""
    lowered = stage.world.seed % 4 == 3
    if lowered:
        for place in stage.of_files:
            place.cap_bytes //= 2
            place.kept_from_s = float("inf")
    chance = random.Random(f"rot {stage.world.seed}")
    for place in stage.of_files:
        place.rot(chance)
    stage.start(0, stage.config(0, share=stage.share / 2 if lowered else stage.share, servers=False))
    node = stage.nodes[0]
    await stage.started(node)
    if node.state != "open":
        raise Violation("a last process does not start")
    names = {name: number for number, name in enumerate(stage.keys)}
    spoilt = set().union(*(weather.spoilt for weather in stage.weathers.values()))
    await node.on_loop(functools.partial(check_reopened, node, stage.of_files, names, spoilt))
    await stage.close(0, 5.0)
    for place in stage.of_files:
        place.check_left(stage.keys)
