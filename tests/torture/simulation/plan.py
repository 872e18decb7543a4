"""What one seed does: how the caches are configured, and which operations and faults happen when."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tests.torture.simulation.fittings import (
    KINDS_BY_PLACE,
    MEMORY,
    SHARED,
    Fittings,
    fittings_of,
    memory_tiers_of,
    tiers_of,
)
from tests.torture.simulation.weather import KINDS_OF_DISKS
from tiercache.core.eviction import POLICIES

CHUNK_BYTES = 4096
FILE_BYTES = 2 * 4096
"""A chunk in a file, with its header."""


@dataclass(frozen=True)
class Setting:
    """The machines and the configuration of every process, all alike."""

    processes: int
    slots: int
    tiers: tuple[str, ...]
    options: dict[str, Any]
    capacity_chunks: int
    """What fits on a device, or into the server."""
    server_evicts: bool
    keys: int
    power: bool
    """Whether the power may be cut."""
    prefix: int = 8
    """So many keys, one after the other from a multiple of it on, follow one another; the first of those follows nothing."""
    fittings: Fittings = field(default_factory=Fittings)


@dataclass(frozen=True)
class Operation:
    """Something that a process is asked to do, or that happens to it."""

    kind: str
    process: int
    after_s: float
    """How long after the one before it begins."""
    keys: tuple[int, ...] = ()
    cancel_s: float | None = None
    """When its caller is cancelled, from its beginning."""
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = {name: value for name, value in asdict(self).items() if value not in (None, (), {}, 0.0)}
        return " ".join(f"{name}={value}" for name, value in shown.items())


_WITH_FITTINGS = 0.4
"""So many seeds have a tier that needs more than a disk."""

_USES = {
    "put": 18,
    "put_many": 8,
    "put_prefix": 10,
    "put_raising": 2,
    "get": 18,
    "get_into": 12,
    "lookup": 6,
    "warm": 3,
    "prefetch": 5,
    "cancel_prefetch": 2,
    "hold": 5,
    "forget": 5,
    "flush": 2,
    "clear_hot": 2,
    "statistics": 1,
}
_EVENTS = {
    "reopen": 1, "kill": 1, "fault": 5, "clear": 3, "litter": 0.5, "no_threads": 0.2, "power": 0.5,
    "empty": 0.3, "wipe": 0.3, "prune": 0.5, "spoil": 0.5, "clock": 0.3, "rest": 1.5,
}  # fmt: skip
_ON_DISKS = ("empty", "wipe", "prune", "spoil", "clock", "litter", "power")


def cap_bytes(chunks: int, directories: int) -> int:
    """For so many chunks, beside the directories that count, and eight chunks more for each."""
    return chunks * FILE_BYTES + directories * (8 * FILE_BYTES + 4 * 4096)


_CHANGES = {"resize_hot": 3, "limit_tenants": 2, "resize_files": 2, "detach": 3, "attach": 3}
"""What operators do to running caches."""
_WITH_CHANGES, _CHANGED = 0.25, 0.04
"""The share of seeds in which they do, and how often beside another operation."""

_TO_DEVICE = ("put_many", "put_prefix", "get_into")
"""What callers do with device memory as well."""


def setting_of(seed: int, *, own: str = "", own_options: Mapping[str, str] | None = None) -> Setting:
    """`own`: module:Class of a third party's tier, which then takes part in every seed, alone or below a disk.

    It is made from RemoteSettings with these options, as `remote_storage_plugin.NAME.module_path` and `class_name` make
    it; {place} in an option is a directory on a simulated disk.
    """
    chance = random.Random(f"setting {seed}")
    kinds = chance.choice(
        [
            ("disk",),
            ("disk",),
            ("disk", "remote"),
            ("disk", "remote"),
            ("remote",),
            (),
            ("disk2",),
            ("fs",),
            ("disk", "fs"),
        ]
    )
    more = random.Random(f"fittings {seed}")
    if more.random() < _WITH_FITTINGS:
        kinds = tiers_of(more)
    kinds = memory_tiers_of(seed) or kinds
    if own:
        kinds = more.choice([("own",), ("own",), ("disk", "own")])
    processes = chance.choice([1, 1, 1, 2, 3]) if set(kinds) & {"disk", "disk2", "fs", *SHARED} and not own else 1
    slots = chance.choice([4, 8, 8, 16, 32])
    cap = chance.choice([6, 12, 24, 64])
    options: dict[str, Any] = {
        "cache_policy": chance.choice(sorted(POLICIES)),
        "blocking_timeout_secs": chance.choice([1, 2, 5]),
        "lookup_timeout_ms": chance.choice([20, 200, 1000]),
        "close_timeout_s": chance.choice([0.5, 5.0]),
        "write_queue_bytes": chance.choice([0, 4096, 4 * 4096]),
        "on_queue_full": chance.choice(["wait", "wait", "skip", "replace"]),
        "queue_wait_s": chance.choice([0.1, 1.0]),
        "disk_io_threads": chance.choice([1, 2, 4]),
        "local_cpu": chance.random() < 0.9,
        "flash_admission": chance.choice(["all", "all", "all", "second_touch"]),
        "disk_durability": chance.choice(["fdatasync", "none"]),
        "prefetch_share": chance.choice([0.25, 0.5, 1.0]),
        "disk_compression": random.Random(f"compression {seed}").choice(["none", "none", "zstd", "lz4"]),
    }
    if set(kinds) & {"disk", "disk2"} and options["local_cpu"]:
        options["preload"] = random.Random(f"preload {seed}").choice(["none", "none", "none", "recent"])
    if _changes_of(seed) is not None:
        options["tenant_max_local_cpu_size"] = slots * CHUNK_BYTES / 2**30  # it limits nobody until it is lowered
    if set(kinds) & {"disk", "disk2", *SHARED}:
        options["max_local_disk_size"] = cap_bytes(cap, 2 if "disk2" in kinds else 1) / 2**30
    capacity = chance.choice([cap // 2 + 8, 2 * cap, 10 * cap])
    return Setting(
        processes=processes,
        slots=slots,
        tiers=kinds,
        options=options,
        capacity_chunks=max(cap, capacity) if MEMORY in kinds else capacity,  # no cap above all memory is accepted
        server_evicts=chance.random() < 0.7,
        keys=chance.choice([4, 12, 40, 120]),
        power=chance.random() < 0.2,
        prefix=chance.choice([4, 10, 2 * slots]),
        fittings=replace(fittings_of(more, kinds), own=own, own_options=dict(own_options or {})),
    )


def places_of(setting: Setting) -> tuple[str, ...]:
    """Where faults may strike."""
    return (*setting.tiers, "gpu") if setting.fittings.device_slots else setting.tiers


def operations_of(seed: int, setting: Setting, count: int) -> list[Operation]:
    chance, more = random.Random(f"operations {seed}"), random.Random(f"operations, more {seed}")
    events = _events_of(setting)
    share = chance.choice([0.0, 0.02, 0.06])
    pace_s = chance.choice([0.0, 1e-4, 1e-3, 0.05])
    uses, use_weights = list(_USES), list(_USES.values())
    found = []
    for _ in range(count):
        process = chance.randrange(setting.processes)
        after_s = chance.expovariate(1 / pace_s) if pace_s and chance.random() < 0.5 else 0.0
        if chance.random() < share:
            (kind,) = chance.choices(list(events), list(events.values()))
            found.append(_event(chance, kind, process, after_s, setting))
            if kind == "empty":
                found[-1].values["itself"] = more.random() < 0.5
            if found[-1].values.get("fault") == "hung" and chance.random() < 0.4:
                # Longer than any wait of any caller, with all that is in flight.
                found.append(Operation("rest", process, 0.0, (), None, {"for_s": 45.0}))
        else:
            (kind,) = chance.choices(uses, use_weights)
            found.append(_use(chance, kind, process, after_s, setting))
    changes = _changes_of(seed)
    return found if changes is None else _with_changes(changes, found, setting)


def _changes_of(seed: int) -> random.Random | None:
    """What decides over changes, where a seed has any: a stream of its own, so that the other seeds stay what they were."""
    chance = random.Random(f"changes {seed}")
    return chance if chance.random() < _WITH_CHANGES else None


def _with_changes(chance: random.Random, operations: list[Operation], setting: Setting) -> list[Operation]:
    found = []
    for operation in operations:
        found.append(operation)
        if chance.random() < _CHANGED:
            (kind,) = chance.choices(list(_CHANGES), list(_CHANGES.values()))
            values: dict[str, Any] = {"share": chance.choice([0.5, 1.0])}
            if kind == "detach":
                values = {"tier": chance.randrange(3), "timeout_s": chance.choice([0.0, 0.01, 1.0])}
            elif kind == "attach":
                values = {}
            elif kind in ("resize_hot", "limit_tenants"):
                values = {"slots": chance.randrange(4, setting.slots + 1)}
            found.append(Operation(kind, chance.randrange(setting.processes), 0.0, (), None, values))
    return found


def _events_of(setting: Setting) -> dict[str, float]:
    on_disk = any(tier != "remote" for tier in setting.tiers)
    kinds = dict(_EVENTS)
    if not setting.power:
        del kinds["power"]
    if not on_disk:
        for kind in _ON_DISKS:
            kinds.pop(kind, None)
    return kinds


def _use(chance: random.Random, kind: str, process: int, after_s: float, setting: Setting) -> Operation:
    values: dict[str, Any] = {}
    if kind in ("put", "get"):
        keys: Sequence[int] = [chance.randrange(setting.keys)]
    elif kind == "hold":
        keys = [chance.randrange(setting.keys) for _ in range(chance.choice([1, 1, 4, setting.slots]))]
    elif kind in ("lookup", "get_into", "put_prefix", "warm", "prefetch"):
        first = chance.randrange(setting.keys)
        if chance.random() < 0.7:
            first -= first % setting.prefix
        end = min(setting.keys, first - first % setting.prefix + setting.prefix)
        keys = range(first, min(end, first + chance.choice([2, 4, 8, 2 * setting.slots])))
    else:
        keys = [chance.randrange(setting.keys) for _ in range(chance.choice([1, 2, 4, 8]))]
    if kind in ("put", "put_many", "put_prefix", "get", "get_into", "warm", "forget", "hold") and chance.random() < 0.6:
        values["deadline_s"] = chance.choice([0.0, 0.001, 0.02, 0.2, 1.0])
    if kind == "flush":
        values["timeout_s"] = chance.choice([0.01, 0.5, 5.0])
    if kind == "hold":
        values["for_s"] = chance.choice([0.0, 0.001, 0.05, 1.0])
    if kind == "prefetch":
        values |= {"deadline": chance.choice([0.0, 0.01, 1.0]), "ttl": chance.choice([0.01, 0.5, 5.0])}
    if setting.fittings.device_slots and kind in _TO_DEVICE:
        values["memory"] = chance.choice(["host", "blocks", "piece"])
    cancel_s = chance.choice([0.0, 1e-5, 1e-4, 1e-3, 0.05]) if chance.random() < 0.12 else None
    if cancel_s is not None and chance.random() < 0.3:
        values["cleanup"] = chance.randrange(setting.keys)
    return Operation(kind, process, after_s, tuple(keys), cancel_s, values)


def _event(chance: random.Random, kind: str, process: int, after_s: float, setting: Setting) -> Operation:
    values: dict[str, Any] = {}
    if kind in ("fault", "clear") and places_of(setting):
        place = chance.choice(places_of(setting))
        values["place"] = place
        if kind == "fault":
            values["fault"] = chance.choice(KINDS_BY_PLACE.get(place, KINDS_OF_DISKS))
            values["rate"] = chance.choice([0.05, 0.3, 1.0])
    if kind in ("reopen", "kill"):
        values["timeout_s"] = chance.choice([0.0, 0.1, 1.0, 5.0])
        values["away_s"] = chance.choice([0.0, 0.01, 2.0])
        values["no_threads_s"] = chance.choice([0.0, 0.0, 0.0, 0.02, 1.0])
    if kind == "reopen" and "disk2" in setting.tiers and setting.processes == 1:
        values["directories"] = chance.choice([1, 2])
    if kind in ("prune", "spoil"):
        values["share"] = chance.choice([0.1, 0.5, 1.0])
    if kind == "wipe":
        values["name"] = chance.choice(["ledger", "tmp", ""])
    if kind == "clock":
        values["by_s"] = chance.choice([-3600.0, -5.0, 5.0, 3600.0])
    if kind == "reopen" and chance.random() < 0.4:
        values["cancel_s"] = chance.choice([0.0, 1e-4, 0.01, 0.5])
    if kind == "litter":
        values["chunks"] = chance.randrange(setting.capacity_chunks)
    if kind == "rest":
        values["for_s"] = chance.choice([1.5, 6.0, 12.0, 45.0, 400.0])
    if kind == "no_threads":
        values["for_s"] = chance.choice([0.001, 0.1])
    return Operation(kind, process, after_s, (), None, values)
