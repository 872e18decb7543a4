"""Device work awaited in the event loop, with asyncio's loop and with uvloop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvloop

from tests.device.fake import FakeDriver, FakeEvent, FakeStream, forked
from tiercache.device.driver import DeviceError, Driver
from tiercache.device.events import EventBridge
from tiercache.device.twin import TwinDriver
from tiercache.testing import JumpingClockLoop

POLICIES = {"asyncio": asyncio.DefaultEventLoopPolicy, "uvloop": uvloop.EventLoopPolicy}
MANY = 1024


@pytest.fixture(params=POLICIES)
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return POLICIES[request.param]()


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@contextmanager
def bridged(driver: Driver) -> Iterator[EventBridge]:
    bridge = EventBridge(driver)
    try:
        yield bridge
    finally:
        bridge.close()
        assert bridge.pending == 0


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def event_threads() -> int:
    return sum("events" in thread.name for thread in threading.enumerate())


async def several_rounds() -> None:
    """Enough for whatever is going to happen in the loop without outside help."""
    for _ in range(10):
        await asyncio.sleep(0)


async def within(futures: list[asyncio.Future[None]]) -> None:
    await asyncio.wait_for(asyncio.gather(*futures), 20)


class TestOrder:
    async def test_nobody_is_told_before_the_device_got_there(self, fake: FakeDriver) -> None:
        with bridged(fake) as bridge:
            stream = fake.make_stream()
            future = bridge.after(stream)
            await several_rounds()
            assert not future.done() and bridge.pending == 1
            fake.happen(stream)
            await within([future])
            assert bridge.pending == 0 and fake.released == 1

    async def test_events_of_a_stream_are_told_in_their_order(self, fake: FakeDriver) -> None:
        with bridged(fake) as bridge:
            stream = fake.make_stream()
            told: list[int] = []
            futures = [bridge.after(stream) for _ in range(20)]
            for number, future in enumerate(futures):
                future.add_done_callback(lambda _, number=number: told.append(number))
            for happened in (1, 7, 12):
                fake.happen(stream, happened)
                await within(futures[: len(told) + happened])
                await several_rounds()
                assert told == list(range(len(told)))
            assert told == list(range(20))

    async def test_streams_do_not_wait_for_each_other(self, fake: FakeDriver) -> None:
        with bridged(fake) as bridge:
            slow, fast = fake.make_stream(), fake.make_stream()
            never = bridge.after(slow)
            for _ in range(5):
                future = bridge.after(fast)
                fake.happen(fast)
                await within([future])
            assert not never.done()
            fake.happen(slow)
            await within([never])

    async def test_an_event_that_happened_before_anybody_asked(self, fake: FakeDriver) -> None:
        with bridged(fake) as bridge:
            stream = fake.make_stream()
            first, second = bridge.after(stream), bridge.after(stream)
            fake.happen(stream, 2)
            await within([second, first])

    async def test_a_thousand_pending_need_few_files_and_one_thread(self, fake: FakeDriver) -> None:
        with bridged(fake) as bridge:
            before, threads = open_files(), event_threads()
            stream = fake.make_stream()
            futures = [bridge.after(stream) for _ in range(MANY)]
            assert bridge.pending == MANY
            assert open_files() - before <= 8
            assert event_threads() - threads <= 1
            for happened in (1, 3, 500, 520):
                done = MANY - bridge.pending
                fake.happen(stream, happened)
                await within(futures[: done + happened])
                assert bridge.pending == MANY - done - happened
            assert open_files() <= before

    async def test_pipes_belong_to_the_oldest_of_a_stream(self, fake: FakeDriver) -> None:
        """Also when who is told waits again at once, before pipes are given to those who waited longer."""
        with bridged(fake) as bridge:
            stream = fake.make_stream()
            futures = [bridge.after(stream) for _ in range(8)]
            beside = fake.streams[-1]
            assert beside is not stream
            for turn in range(8):
                futures[turn].add_done_callback(lambda _: futures.append(bridge.after(stream)))
            for turn in range(8):
                fake.happen(stream)
                await within([futures[turn]])
                await several_rounds()
                awaited = [work for work in beside.work if isinstance(work, FakeEvent)]
                assert awaited == list(stream.events)[:4]
            fake.happen(stream, 8)
            await within(futures)

    async def test_work_of_a_device_is_awaited_while_the_loop_runs(self, driver: Driver) -> None:
        with bridged(driver) as bridge:
            memory = driver.allocate(1 << 20)
            streams = [driver.make_stream() for _ in range(3)]
            for turn in range(20):
                futures = []
                for stream in streams:
                    driver.fill(memory.address, turn, memory.length_bytes, stream)
                    futures.append(bridge.after(stream))
                await within(futures)
            assert bridge.pending == 0
            driver.free(memory)


class TestCancellation:
    async def test_a_cancelled_waiter_is_not_missed_and_the_others_are_told(self, fake: FakeDriver) -> None:
        with bridged(fake) as bridge:
            stream = fake.make_stream()
            first, second, third = (bridge.after(stream) for _ in range(3))
            waiter = asyncio.ensure_future(_await(second))
            await several_rounds()
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert bridge.pending == 3, "the device's work goes on"
            fake.happen(stream, 3)
            await within([first, third])
            assert second.cancelled() and bridge.pending == 0

    async def test_nobody_left_to_be_told(self, fake: FakeDriver) -> None:
        with bridged(fake) as bridge:
            stream = fake.make_stream()
            for _ in range(10):
                bridge.after(stream).cancel()
            last = bridge.after(stream)
            fake.happen(stream, 11)
            await within([last])


async def _await(future: asyncio.Future[None]) -> None:
    await future


class TestFailure:
    async def test_all_who_wait_hear_of_a_failed_device(self, fake: FakeDriver) -> None:
        with bridged(fake) as bridge:
            one, other = fake.make_stream(), fake.make_stream()
            futures = [bridge.after(stream) for stream in (one, one, other)]
            fake.refused |= {"query", "lost"}
            for future in futures:
                with pytest.raises(DeviceError, match="fake: query refused") as caught:
                    await within([future])
                assert caught.value.lost
            fake.happen(one, 2)  # a signal that comes after all
            fake.happen(other)
            await several_rounds()

    async def test_a_device_lost_while_its_work_is_awaited(self) -> None:
        driver = TwinDriver()
        held = threading.Event()
        stream = driver.make_stream()
        stream.enqueue(held.wait)
        with bridged(driver) as bridge:
            futures = [bridge.after(stream) for _ in range(6)]
            await several_rounds()
            driver.lose()
            held.set()
            for future in futures:
                with pytest.raises(DeviceError, match="the device is lost"):
                    await within([future])
            with pytest.raises(DeviceError, match="the device is lost"):
                bridge.after(stream)
        driver.close()

    async def test_a_driver_that_records_no_event(self, fake: FakeDriver) -> None:
        with bridged(fake) as bridge:
            fake.refused.add("record")
            with pytest.raises(DeviceError, match="record refused"):
                bridge.after(fake.idle)
            assert bridge.pending == 0

    @pytest.mark.parametrize("method", ["wait", "call"])
    async def test_a_driver_that_takes_no_callback(self, fake: FakeDriver, method: str) -> None:
        with bridged(fake) as bridge:
            before = open_files()
            fake.refused.add(method)
            with pytest.raises(DeviceError, match=f"{method} refused"):
                bridge.after(fake.idle)
            assert bridge.pending == 0 and open_files() == before and fake.released == 1
            fake.refused.clear()
            fake.happen(fake.idle)
            future = bridge.after(fake.idle)
            fake.happen(fake.idle)
            await within([future])

    async def test_a_driver_that_takes_no_more_callbacks(self, fake: FakeDriver) -> None:
        """What has no pipe yet is seen by the watch."""
        with bridged(fake) as bridge:
            futures = [bridge.after(fake.idle) for _ in range(12)]
            fake.refused.add("call")
            fake.happen(fake.idle, 2)
            await within(futures[:2])
            fake.happen(fake.idle, 10)
            await within(futures)

    async def test_no_file_left_for_a_pipe(self, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(flags: int) -> tuple[int, int]:
            raise OSError(24, "Too many open files")

        with bridged(fake) as bridge:
            with monkeypatch.context() as patched:
                patched.setattr(os, "pipe2", refuse)
                futures = [bridge.after(fake.idle) for _ in range(3)]
                fake.happen(fake.idle, 2)
                await within(futures[:2])
            calls = fake.calls
            futures.append(bridge.after(fake.idle))
            assert fake.calls == calls + 1, "and pipes again when there are files again"
            fake.happen(fake.idle, 2)
            await within(futures)


class TestEnd:
    async def test_close_fails_what_is_pending_and_late_signals_find_nobody(self, fake: FakeDriver) -> None:
        before, threads = open_files(), event_threads()
        bridge = EventBridge(fake)
        streams = [fake.make_stream() for _ in range(3)]
        futures = [bridge.after(stream) for stream in streams for _ in range(7)]
        bridge.close()
        bridge.close()
        for future in futures:
            with pytest.raises(DeviceError, match="closed while its work was awaited"):
                await future
        with pytest.raises(DeviceError, match="the event bridge is closed"):
            bridge.after(streams[0])
        for stream in streams:
            fake.happen(stream, 7)
        await several_rounds()
        assert open_files() <= before
        _join_event_threads(threads)
        assert fake.released == 21, "no event is lost"

    def test_a_loop_that_ends_first(self, fake: FakeDriver) -> None:
        threads = event_threads()
        stream = fake.make_stream()
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            loop = asyncio.new_event_loop()
            before = open_files()

            async def begin() -> tuple[EventBridge, list[asyncio.Future[None]]]:
                bridge = EventBridge(fake)
                futures = [bridge.after(stream) for _ in range(7)]
                futures[0].add_done_callback(lambda _: None)
                return bridge, futures

            bridge, futures = loop.run_until_complete(begin())
            loop.close()
            fake.happen(stream, 6)
            bridge.close()
            fake.happen(stream)
            assert not any(future.done() for future in futures)
            del bridge, futures
            assert open_files() <= before
        _join_event_threads(threads)

    async def test_a_write_end_is_closed_once(self, fake: FakeDriver) -> None:
        """Whoever opens a file meanwhile, and gets the same number, keeps it."""
        with bridged(fake) as bridge:
            mine: list[int] = []
            for turn in range(50):
                futures = [bridge.after(fake.idle) for _ in range(6)]
                if turn % 3 == 0:
                    futures[2].cancel()
                fake.happen(fake.idle, 3)
                mine.append(os.open("/dev/null", os.O_RDONLY))
                await within([futures[1]])
                mine.append(os.open("/dev/null", os.O_RDONLY))
                fake.happen(fake.idle, 3)
                mine.append(os.open("/dev/null", os.O_RDONLY))
                await within([futures[-1]])
        assert len(set(mine)) == len(mine)
        for descriptor in mine:
            assert os.readlink(f"/proc/self/fd/{descriptor}") == "/dev/null"
            os.close(descriptor)

    async def test_a_fork_that_holds_the_pipes_open(self, fake: FakeDriver) -> None:
        with bridged(fake) as bridge:
            futures = [bridge.after(fake.idle) for _ in range(4)]
            with forked():
                fake.happen(fake.idle, 4)
                await within(futures)
                calls = fake.calls
                futures = [bridge.after(fake.idle) for _ in range(4)]
                assert fake.calls == calls + 4, "later ones have pipes that the fork does not hold"
            await several_rounds()
            assert not any(future.done() for future in futures), "the end of the fork tells nobody anything"
            fake.happen(fake.idle, 4)
            await within(futures)


def _join_event_threads(expected: int) -> None:
    for thread in threading.enumerate():
        if "fake-events" in thread.name:
            thread.join(10)
    assert event_threads() <= expected


class TestIdle:
    """On a clock that jumps to the next timer."""

    def test_a_bridge_with_nothing_pending_asks_nothing(self, fake: FakeDriver) -> None:
        async def main() -> None:
            with bridged(fake) as bridge:
                future = bridge.after(fake.idle)
                fake.happen(fake.idle)
                await within([future])
                queries = fake.queries
                await asyncio.sleep(3600)
                assert fake.queries == queries

        with asyncio.Runner(loop_factory=JumpingClockLoop) as runner:
            runner.run(main())

    def test_waiting_for_many_asks_about_the_oldest_of_each_stream(self, fake: FakeDriver) -> None:
        async def main() -> None:
            with bridged(fake) as bridge:
                streams: list[FakeStream] = [fake.make_stream() for _ in range(2)]
                futures = [bridge.after(stream) for stream in streams for _ in range(32)]
                await asyncio.sleep(0.5)
                assert fake.queries <= 2 * 0.5 * 20
                for stream in streams:
                    fake.happen(stream, 32)
                await within(futures)

        with asyncio.Runner(loop_factory=JumpingClockLoop) as runner:
            runner.run(main())
