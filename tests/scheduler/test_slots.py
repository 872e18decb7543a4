"""Waiters get slots in turn, whatever happens to other waiters."""

import asyncio
from collections.abc import Iterable

from tests.scheduler.conftest import SLOTS, Bench, release, soon
from tests.scheduler.held import begun
from tiercache.memory.slots import Purpose, Slot
from tiercache.scheduler.reads import Reader, ReaderSettings
from tiercache.testing import chunk


def take_all(bench: Bench, purpose: Purpose = Purpose.WRITE) -> list[Slot]:
    slots = []
    while (slot := bench.cpu.try_reserve(purpose)) is not None:
        slots.append(slot)
    return slots


def free_all(bench: Bench, slots: Iterable[Slot], purpose: Purpose = Purpose.WRITE) -> None:
    for slot in slots:
        bench.cpu.abandon(slot, purpose)


async def test_slots_come_in_the_order_in_which_they_were_asked_for(bench: Bench) -> None:
    slots = take_all(bench)
    order: list[int] = []

    async def wait(number: int) -> None:
        slot = await bench.cpu.reserve(Purpose.WRITE, 60.0)
        assert slot is not None
        order.append(number)
        await asyncio.sleep(0)
        bench.cpu.abandon(slot, Purpose.WRITE)

    tasks = [await begun(wait(number)) for number in range(8)]
    free_all(bench, slots)
    await asyncio.gather(*tasks)
    assert order == list(range(8))


async def test_chunk_that_is_read_is_not_evicted_for_a_waiter(bench: Bench) -> None:
    """The pin of a prefetched chunk ends with its first access, which makes it evictable; the reader's lease protects it."""
    bench.cpu.budget.floor = 0
    bench.make_hot(1).release()
    pin = bench.cpu.pin(chunk(1)[0])
    assert pin is not None
    bench.cpu.on_pinned_access = lambda _: pin.release()
    slots = take_all(bench, Purpose.READ)
    waiting = await begun(bench.cpu.reserve(Purpose.READ, 1.0))
    lease = bench.cpu.lease(chunk(1)[0])
    assert lease is not None and bench.cpu.contains(chunk(1)[0])
    lease.release()
    got = await waiting
    free_all(bench, slots if got is None else [got, *slots], Purpose.READ)


async def test_batch_of_pinned_chunks_is_read_whole_while_a_put_waits(bench: Bench) -> None:
    keys = [chunk(number)[0] for number in range(SLOTS)]
    bench.keep_hot(range(SLOTS))
    bench.cpu.link(keys)
    pins = [bench.cpu.pin(key) for key in keys[: SLOTS - bench.cpu.budget.floor]]
    waiting = await begun(bench.cpu.reserve(Purpose.WRITE, 60.0))
    assert not waiting.done()  # what is not pinned is left to reads, and the leases of this read count for those
    delivered: list[bytes] = []
    reader = Reader(bench.cpu, [], ReaderSettings(deadline_s=5.0))
    sinks = [lambda view: delivered.append(bytes(view))] * SLOTS
    assert await reader.deliver(keys, sinks, soon()) == SLOTS
    assert sorted(delivered) == sorted(chunk(number)[1].tobytes() for number in range(SLOTS))
    release(*pins)
    slot = await waiting
    assert slot is not None
    free_all(bench, [slot])
