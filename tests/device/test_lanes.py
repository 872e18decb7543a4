"""The end of device work, awaited in an event loop: in order, without a thread for each, and never too early."""

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.device.twin import TwinDriver
from tiercache.device.device import Device, Lane
from tiercache.device.driver import Driver
from tiercache.errors import DeviceError


@pytest.fixture
def driver() -> Iterator[TwinDriver]:
    driver = TwinDriver()
    yield driver
    driver.close()


@pytest.fixture
def lane(driver: TwinDriver) -> Iterator[Lane]:
    lane = Lane(driver, "test")
    yield lane
    lane.close()


async def test_ends_come_after_the_work_and_in_its_order(driver: TwinDriver, lane: Lane) -> None:
    seen: list[int] = []
    ends = []
    threads = threading.active_count()
    for number in range(200):
        driver.enqueue(lane.stream, lambda number=number: seen.append(number))  # type: ignore[misc]
        ends.append(lane.end())
        ends[-1].add_done_callback(lambda _, number=number: seen.index(number))  # type: ignore[misc]
    await asyncio.gather(*ends)
    assert seen == list(range(200))
    assert threading.active_count() == threads


async def test_what_has_ended_is_not_waited_for() -> None:
    lane = Lane(Driver(), "test")
    assert lane.end().done()
    lane.close()


async def test_cancelling_an_end_cancels_neither_the_work_nor_later_ends(driver: TwinDriver, lane: Lane) -> None:
    hold = threading.Event()
    lane.stream.enqueue(hold.wait)
    first, second = lane.end(), lane.end()
    first.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    hold.set()
    await second


async def test_an_event_of_another_stream_is_awaited(driver: TwinDriver, lane: Lane) -> None:
    other, hold = driver.make_stream(), threading.Event()
    other.enqueue(hold.wait)
    end = lane.after(driver.record(other))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not end.done()
    hold.set()
    await end


async def test_a_lost_device_fails_everything_that_is_awaited(driver: TwinDriver, lane: Lane) -> None:
    hold = threading.Event()
    lane.stream.enqueue(hold.wait)
    ends = [lane.end(), lane.end()]
    driver.lose()
    ends.append(lane.end())
    for end in ends:
        with pytest.raises(DeviceError, match="lost"):
            await end
    hold.set()


async def test_work_that_raises_is_waited_for_to_its_end(driver: TwinDriver) -> None:
    device = Device(driver, 4096)
    hold = threading.Event()

    def enqueue() -> None:
        device.storing.stream.enqueue(hold.wait)
        raise ValueError("in the middle")

    done = device.run(device.storing, enqueue)
    await asyncio.to_thread(lambda: None)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not done.done()
    hold.set()
    with pytest.raises(ValueError, match="in the middle"):
        await device.ended(done)
    device.close()


async def test_device_that_is_closed_while_it_copies_keeps_memory_pinned_until_the_copy_ends(driver: TwinDriver) -> None:
    device, hold, unpinned = Device(driver, 4096), threading.Event(), asyncio.Event()
    loop, memory = asyncio.get_running_loop(), np.zeros(4096, np.uint8)
    device.pin(memory, 4096)
    driver.unpin = lambda memory: loop.call_soon(unpinned.set)  # type: ignore[method-assign,assignment]
    copy = device.run(device.storing, device.storing.stream.enqueue, hold.wait)
    device.close()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not unpinned.is_set()
    hold.set()
    async with asyncio.timeout(60.0):
        await copy
        await unpinned.wait()
