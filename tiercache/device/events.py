"""Awaiting the end of device work in an event loop, without a thread per wait, without spinning, without blocking.

The device's driver calls a native function when the stream gets there, on a thread of its own. That function is libc's
`close`, its argument the write end of a pipe: no Python and no GIL. The read end reports a hang-up to an epoll instance of
ours, and the loop watches only that one descriptor.

Callbacks are enqueued on a stream beside the one that is awaited: work that follows on the latter does not wait for them.
Since events of one stream happen in order, only the oldest few of each have a pipe: a thousand waits need no thousand files.
A driver never calls back when the device fails, and a process forked meanwhile holds the pipes open, so pending events are
also looked at 20 times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import select
from collections import deque
from dataclasses import dataclass, field

from tiercache.device.driver import DeviceError, Driver, Event, Stream

_WATCH_S = 0.05
_MOST_READY = 256
_PIPES_A_STREAM = 4


@dataclass(eq=False)
class _Pending:
    event: Event
    future: asyncio.Future[None]
    read_end: int | None = None


@dataclass(eq=False)
class _Lane:
    """What is awaited of one stream, the oldest first."""

    stream: Stream
    waiting: deque[_Pending] = field(default_factory=deque)


class EventBridge:
    """For one driver and one event loop. All methods belong to the loop.

    What is awaited is cancelled like any future: the device's work goes on, and its signal, when it comes, finds nobody.
    `close` fails what is still pending with DeviceError; signals that come later are harmless.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.loop = asyncio.get_running_loop()
        self._lanes: dict[Stream, _Lane] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False
        self._pipes = _Pipes(self)

    @property
    def pending(self) -> int:
        """Events that have not been seen to happen."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def after(self, stream: Stream) -> asyncio.Future[None]:
        """A future that is done when all that is enqueued on `stream` by now has ended; DeviceError when the device failed.

        Raises DeviceError at once when the driver refuses.
        """
        if self._closed:
            raise DeviceError(f"{self.driver.name}: the event bridge is closed")
        lane = self._lanes.get(stream)
        if lane is None:
            lane = self._lanes[stream] = _Lane(stream)
        pending = _Pending(self.driver.record(stream), self.loop.create_future())
        lane.waiting.append(pending)
        try:
            self._pipes.begin(lane, pending)
        except BaseException:
            lane.waiting.remove(pending)
            self.driver.release(pending.event)
            raise
        if self._watch is None:
            self._watch = self.loop.call_later(_WATCH_S, self._look_at_all)
        return pending.future

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        for lane in self._lanes.values():
            self._fail(lane, DeviceError(f"{self.driver.name}: closed while its work was awaited"))
        self._pipes.close()

    def settle(self, lane: _Lane) -> bool:
        """Tell who waits for events of `lane` that have happened; whether there were any."""
        settled = False
        while lane.waiting:
            pending = lane.waiting[0]
            try:
                happened = self.driver.query(pending.event)
            except DeviceError as error:
                self._fail(lane, error)
                return True
            if not happened:
                break
            lane.waiting.popleft()
            settled = True
            self._pipes.end(pending)
            self.driver.release(pending.event)
            if not pending.future.done():
                pending.future.set_result(None)
        if lane.waiting:
            self._pipes.go_on(lane)
        return settled

    def _fail(self, lane: _Lane, error: DeviceError) -> None:
        while lane.waiting:
            pending = lane.waiting.popleft()
            self._pipes.end(pending)
            self.driver.release(pending.event)
            # Who waits in a loop that is closed can be told nothing.
            if not pending.future.done() and not self.loop.is_closed():
                pending.future.set_exception(DeviceError(str(error), lost=error.lost))
                pending.future.exception()  # whoever does not await it need not read about it in the log

    def _look_at_all(self) -> None:
        self._watch = None
        for lane in self._lanes.values():
            self.settle(lane)
        if self.pending:
            self._watch = self.loop.call_later(_WATCH_S, self._look_at_all)


class _Pipes:
    """The write end of each pipe belongs to the callback from the moment it is enqueued: closing it here as well could close
    a file that got the same number since. When the device is lost it stays open, a few for each stream.
    """

    def __init__(self, bridge: EventBridge) -> None:
        self._bridge = bridge
        self._close = ctypes.cast(ctypes.CDLL(None).close, ctypes.c_void_p).value or 0
        self._beside: dict[Stream, Stream] = {}
        self._armed: dict[int, tuple[_Lane, _Pending]] = {}
        self._epoll = select.epoll()
        bridge.loop.add_reader(self._epoll.fileno(), self._ready)

    def begin(self, lane: _Lane, pending: _Pending) -> None:
        if len(lane.waiting) <= _PIPES_A_STREAM:
            self._arm(lane, pending)

    def go_on(self, lane: _Lane) -> None:
        """Give pipes to the oldest that are left - when those who wait have gone on: asking the driver takes its time."""
        self._bridge.loop.call_soon(self._arm_oldest, lane)

    def _arm_oldest(self, lane: _Lane) -> None:
        for pending in itertools.islice(lane.waiting, _PIPES_A_STREAM):
            if pending.read_end is None:
                # What the driver refuses now it will refuse to the watch as well, which tells the waiters.
                with contextlib.suppress(DeviceError):
                    self._arm(lane, pending)

    def end(self, pending: _Pending) -> None:
        """Its signal is no longer needed, or has come."""
        if pending.read_end is None:
            return
        del self._armed[pending.read_end]
        # Not left to `close`: a forked process may hold the read end too, and it would be reported under a number that is
        # another's by then.
        self._epoll.unregister(pending.read_end)
        os.close(pending.read_end)
        pending.read_end = None

    def close(self) -> None:
        if not self._bridge.loop.is_closed():
            self._bridge.loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        for beside in self._beside.values():
            # Of a lost device nothing can be given back.
            with contextlib.suppress(DeviceError):
                self._bridge.driver.drop_stream(beside)

    def _arm(self, lane: _Lane, pending: _Pending) -> None:
        driver = self._bridge.driver
        beside = self._beside.get(lane.stream)
        if beside is None:
            beside = self._beside[lane.stream] = driver.make_stream()
        try:
            read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return  # no file is left: the watch sees it
        try:
            driver.wait(beside, pending.event)
            driver.call(beside, self._close, write_end)
        except BaseException:
            os.close(read_end)
            os.close(write_end)
            raise
        self._epoll.register(read_end, 0)  # a hang-up is always reported
        self._armed[read_end] = lane, pending
        pending.read_end = read_end

    def _ready(self) -> None:
        lanes = {}
        for read_end, _ in self._epoll.poll(0, _MOST_READY):
            lane, pending = self._armed[read_end]
            lanes[lane.stream] = lane
            self.end(pending)
        for lane in lanes.values():
            self._bridge.settle(lane)
