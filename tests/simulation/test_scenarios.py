"""Histories that were written by hand, and that the simulation finds nothing wrong with (or something)."""

import gc
from typing import Any

import pytest

from tests.torture.simulation.fittings import Fittings
from tests.torture.simulation.plan import Operation, Setting, cap_bytes
from tests.torture.simulation.run import run_seed
from tiercache.memory.slots import Lease
from tiercache.tiers.files.tier import FileTier

OPTIONS = {"blocking_timeout_secs": 5, "lookup_timeout_ms": 200}


def operation(kind: str, *keys: int, **values: Any) -> Operation:
    return Operation(kind, 0, 0.01, keys, None, values)


def setting(tier: str, slots: int = 8, chunks: int = 40, fittings: Fittings | None = None, **options: Any) -> Setting:
    more = () if fittings is None else (fittings,)
    return Setting(1, slots, (tier,), options, 240, True, chunks, False, 4, *more)


FLUSH = operation("flush", timeout_s=5.0)
STORE = [operation("put_many", 1, 2, 3), FLUSH, operation("clear_hot")]
LONG_AFTER = operation("rest", for_s=400.0)
GET = operation("get", 1)


@pytest.mark.parametrize(("tier", "for_s", "seed"), [("fs", 0.01, 3), ("disk", 0.3, 4)])
def test_a_count_that_was_deleted_is_known_again_after_the_faults(tier: str, for_s: float, seed: int) -> None:
    """Until then nothing is written, and scans that fail are at least a second apart."""
    operations = [
        operation("put_many", 1, 2, 3),
        FLUSH,
        operation("fault", place=tier, fault="slow", rate=1.0),
        operation("wipe", name="ledger"),
        *[operation("put", key) for key in range(5, 12)],
        operation("rest", for_s=for_s),
        operation("fault", place=tier, fault="eio", rate=0.3),
        *[operation("put", key) for key in range(15, 19)],
        operation("rest", for_s=1.0),
    ]
    assert run_seed(seed, operations, setting=setting(tier)).failure is None


@pytest.mark.parametrize("shared_arena", [True, False], ids=["arena", "buffers"])
@pytest.mark.parametrize(("after_s", "away_s"), [(10.0, 0.001), (15.9, 5.0), (24.8, 0.001)])
def test_everything_is_written_after_a_3fs_daemon_died_that_had_stopped_to_answer(
    after_s: float, away_s: float, shared_arena: bool
) -> None:
    """Rings that are worn out are given up and, while the daemon has the arena mapped, no others are made. Its death in that
    time is seen by nothing but the files that were opened on its mount, which are of no use any more."""
    operations = [
        *STORE,
        operation("fault", place="hf3fs", fault="stuck", rate=1.0),
        *(operation("put", key) for key in range(10, 16)),
        GET,
        operation("get", 2),
        operation("rest", for_s=after_s),
        operation("fault", place="hf3fs", fault="dead", rate=1.0),
        operation("rest", for_s=away_s),
        operation("clear", place="hf3fs"),
        operation("rest", for_s=60.0),
    ]
    fittings = Fittings(shared_arena=shared_arena, ring_places=2, ring_entries=4)
    assert run_seed(0, operations, setting=setting("hf3fs", 32, 64, fittings, **OPTIONS)).failure is None


def small_disk() -> Setting:
    return setting("disk", chunks=12, max_local_disk_size=cap_bytes(8, 1) / 2**30, **OPTIONS)


PRUNE, EMPTY = operation("prune", share=1.0), operation("empty")
CANNOT_READ = [operation("fault", place="disk", fault="eio", rate=1.0), GET, operation("clear", place="disk")]


@pytest.mark.parametrize(
    "then",
    [
        pytest.param([PRUNE, GET, LONG_AFTER, FLUSH], id="a-read-finds-that-a-file-is-gone"),
        pytest.param([PRUNE, LONG_AFTER, GET], id="and-finds-it-late"),
        pytest.param([EMPTY, LONG_AFTER, operation("put", 4), FLUSH], id="a-write-finds-the-directory-emptied"),
        pytest.param([EMPTY, *STORE, GET, LONG_AFTER, FLUSH], id="what-is-put-while-a-tier-believes-to-have-it"),
        pytest.param([operation("spoil", share=1.0), GET, LONG_AFTER, FLUSH], id="files-that-cannot-be-read-for-good"),
        pytest.param([*CANNOT_READ, LONG_AFTER, FLUSH], id="or-for-a-moment"),
    ],
)
def test_files_that_somebody_deletes_or_spoils_cost_themselves(then: list[Operation]) -> None:
    assert run_seed(0, [*STORE, *then], setting=small_disk()).failure is None


def test_a_tier_that_does_not_write_again_what_was_deleted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write: Any = FileTier.write
    written = set()

    async def write_once(self: FileTier, key: bytes, *payload: Any) -> bool:
        if key in written:
            return True
        written.add(key)
        return bool(await write(self, key, *payload))

    monkeypatch.setattr(FileTier, "write", write_once)
    operations = [*STORE, PRUNE, GET, operation("put", 1), LONG_AFTER, FLUSH]
    failure = run_seed(0, operations, setting=small_disk()).failure
    assert "keys [1] are not there" in str(failure)


@pytest.mark.parametrize("tier", ["fs", "weka"])
def test_a_chunk_that_is_being_evicted_is_not_missing(tier: str) -> None:
    """An instance takes chunks out of its index, deletes them, and counts them then."""
    operations = []
    for key in range(0, 40, 2):  # 24 fit
        operations.append(operation("put_many", key, key + 1))
        operations.append(Operation("flush", 0, 0.0, values={"timeout_s": 5.0}))
    outcomes = [run_seed(seed, operations, setting=setting(tier)) for seed in range(30, 40)]
    assert {outcome.seed: str(outcome.failure) for outcome in outcomes if outcome.failure} == {}


def held_leases() -> list[Lease]:
    return [one for one in gc.get_objects() if type(one) is Lease and one._entry is not None]


def test_a_lease_of_the_dead_says_nothing_later() -> None:
    """In this seed Python keeps an exception of a killed process, and its frames keep a whole world."""
    before = held_leases()
    assert run_seed(163741987697).failure is None
    assert all(one in before for one in held_leases())
