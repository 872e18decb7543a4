"""A cache that is wrong on purpose is found out, and what is said of it is enough to see why."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.torture.simulation import seeds
from tests.torture.simulation.plan import Operation
from tests.torture.simulation.run import Outcome, run_seed
from tests.torture.simulation.seeds import failure_of
from tiercache.cache import TierCache
from tiercache.core.header import Header
from tiercache.memory.slots import SlotPool
from tiercache.tiers.cpu import CpuTier

_SEEDS = 30


def _first_failure() -> tuple[int, BaseException]:
    for seed in range(_SEEDS):
        if (failure := run_seed(seed).failure) is not None:
            return seed, failure
    pytest.fail(f"{_SEEDS} seeds found nothing")


def test_bytes_that_change_while_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    publish: Any = CpuTier.publish

    def publish_changed(self: CpuTier, key: bytes, slot: Any, *arguments: Any, **named: Any) -> Any:
        self.pool.view(slot)[8:9] ^= 1
        return publish(self, key, slot, *arguments, **named)

    monkeypatch.setattr(CpuTier, "publish", publish_changed)
    _, failure = _first_failure()
    assert "torn" in str(failure) or "wrong bytes" in str(failure)


def test_pages_that_are_given_up_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    places = SlotPool._places
    monkeypatch.setattr(SlotPool, "_places", lambda pool, slots: places(pool, range(pool.reserved)))
    _, failure = _first_failure()
    assert "torn" in str(failure) or "wrong bytes" in str(failure)


def test_files_of_which_only_the_headers_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Header, "check_payload", lambda self, checksum: None)
    _, failure = _first_failure()
    assert "wrong bytes" in str(failure) or "torn" in str(failure)


def test_prefetches_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetch = TierCache.prefetch
    monkeypatch.setattr(TierCache, "prefetch", lambda self, keys, **named: prefetch(self, [], **named))
    _, failure = _first_failure()
    assert "nothing hinders a prefetch" in str(failure)


async def _for_ever() -> None:
    await asyncio.Event().wait()


def _leave_a_task(cache: TierCache) -> None:
    cache.__dict__.setdefault("left", set()).add(asyncio.create_task(_for_ever()))


def _leave_one_task(cache: TierCache) -> None:
    if "left" not in vars(cache):
        _leave_a_task(cache)


def _leave_a_timer(cache: TierCache) -> None:
    asyncio.get_running_loop().call_later(1e6, print)


@pytest.mark.parametrize(
    ("leave", "at_close", "said"),
    [
        (_leave_one_task, False, "a closed cache left behind: {'tasks and timers'"),
        (_leave_a_timer, False, "a closed cache left behind: {'tasks and timers'"),
        (_leave_a_task, True, "so many tasks of a kind go on: {'_for_ever'"),
    ],
    ids=["a task", "a timer", "tasks that the close ends"],
)
def test_what_lookups_leave_on_the_loop(
    leave: Callable[[TierCache], None], at_close: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up, close = TierCache.lookup_keys, TierCache.close

    async def look_up_and_leave(self: TierCache, keys: Any) -> Any:
        leave(self)
        return await look_up(self, keys)

    async def close_and_end(self: TierCache, *arguments: Any) -> Any:
        for task in vars(self).get("left", ()) if at_close else ():
            task.cancel()
        return await close(self, *arguments)

    monkeypatch.setattr(TierCache, "lookup_keys", look_up_and_leave)
    monkeypatch.setattr(TierCache, "close", close_and_end)
    _, failure = _first_failure()
    assert said in str(failure)


def test_few_operations_are_left_of_a_failing_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuTier, "forget", lambda self, key: None)
    seed, _ = _first_failure()
    failure = failure_of(seed)
    assert failure is not None
    assert "it was forgotten" in failure.error
    assert len(failure.operations) <= 4 < failure.of
    assert "forget" in {operation.kind for operation in failure.operations}


def spins(*_: object) -> None:
    with contextlib.suppress(AssertionError):  # as a loop that goes on whatever is raised in it
        while True:
            pass
    while True:
        pass


def test_a_seed_that_spins_is_ended_and_not_run_again_to_make_it_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuTier, "forget", spins)
    monkeypatch.setattr(seeds, "_LONGEST_CPU_S", 3.0)
    monkeypatch.setattr(seeds, "_AGAIN_S", 0.5)
    began_s = time.process_time()
    failure = failure_of(0)
    assert failure is not None
    assert "something spins" in failure.error
    assert len(failure.operations) == failure.of
    assert time.process_time() - began_s < 6.0


def test_parts_of_a_failing_seed_that_spin_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_part(seed: int, operations: Sequence[Operation] | None, **named: Any) -> Outcome:
        if operations is not None:
            monkeypatch.setattr(CpuTier, "forget", spins)
        return run_seed(seed, operations, **named)

    monkeypatch.setattr(CpuTier, "forget", lambda self, key: None)
    seed, _ = _first_failure()
    monkeypatch.setattr(seeds, "run_seed", run_part)
    monkeypatch.setattr(seeds, "_SHRINK_S", 3.0)
    monkeypatch.setattr(seeds, "_AGAIN_S", 0.5)
    began_s = time.process_time()
    failure = failure_of(seed)
    assert failure is not None
    assert "it was forgotten" in failure.error
    assert time.process_time() - began_s < 20.0
