"""Awaiting the end of device work in an event loop, without a thread per wait, without spinning, without blocking.

Three ways, chosen by `how`, all with the same promise:

- **callback** (the default): the device's driver calls a native function when the stream gets there, on a thread of its own.
  That function is libc's `close`, its argument the write end of a pipe: no Python and no GIL. The read end reports a hang-up
  to an epoll instance of ours, and the loop watches only that one descriptor.
- **thread**: a thread for each stream sleeps in the driver until the oldest event of that stream has happened. Events of one
  stream happen in order, so one thread is enough however many wait.
- **polling**: a timer of the loop asks, first soon, then less and less often. For drivers that can do neither.

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
import logging
import os
import select
import threading
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue

from tiercache.device.driver import DeviceError, Driver, Event, Stream

logger = logging.getLogger("tiercache.device")

WAYS = ("callback", "thread", "polling")
_WATCH_S = 0.05
_FIRST_POLL_S = 0.0001
_SLOWEST_POLL_S = 0.005
_SLOWER = 1.5
_MOST_READY = 256
_PIPES_A_STREAM = 4


@dataclass(eq=False)
class _Pending:
    event: Event
    future: asyncio.Future[None]
    read_end: int | None = None
    uses: int = 1
    """Who still needs the event: the lane, and a thread that may be asleep on it. The last one gives it back."""


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

    def __init__(self, driver: Driver, how: str = "callback") -> None:
        if how not in WAYS:
            raise ValueError(f"expected one of {', '.join(WAYS)}, found {how!r}")
        self.driver = driver
        self.how = how
        self.loop = asyncio.get_running_loop()
        self._lanes: dict[Stream, _Lane] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False
        self._way: _Callbacks | _Threads | _Polling
        if how == "callback":
            self._way = _Callbacks(self)
        elif how == "thread":
            self._way = _Threads(self)
        else:
            self._way = _Polling(self)

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
            self._way.begin(lane, pending)
        except BaseException:
            lane.waiting.remove(pending)
            self.let_go(pending)
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
        self._way.close()

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
            self._way.end(pending)
            self.let_go(pending)
            if not pending.future.done():
                pending.future.set_result(None)
        if lane.waiting:
            self._way.go_on(lane)
        return settled

    def let_go(self, pending: _Pending) -> None:
        pending.uses -= 1
        if not pending.uses:
            self.driver.release(pending.event)

    def _fail(self, lane: _Lane, error: DeviceError) -> None:
        while lane.waiting:
            pending = lane.waiting.popleft()
            self._way.end(pending)
            self.let_go(pending)
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


class _Callbacks:
    """The write end of each pipe belongs to the callback from the moment it is enqueued: closing it here as well could close
    a file that got the same number since. When the device is lost it stays open, a few for each stream.
    """

    def __init__(self, bridge: EventBridge) -> None:
        self._bridge = bridge
        self._close = ctypes.cast(ctypes.CDLL(None).close, ctypes.c_void_p).value or 0
        self._beside: dict[Stream, Stream] = {}
        self._pipes: dict[int, tuple[_Lane, _Pending]] = {}
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
        del self._pipes[pending.read_end]
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
        self._pipes[read_end] = lane, pending
        pending.read_end = read_end

    def _ready(self) -> None:
        lanes = {}
        for read_end, _ in self._epoll.poll(0, _MOST_READY):
            lane, pending = self._pipes[read_end]
            lanes[lane.stream] = lane
            self.end(pending)
        for lane in lanes.values():
            self._bridge.settle(lane)


class _Threads:
    def __init__(self, bridge: EventBridge) -> None:
        self._bridge = bridge
        self._queues: dict[Stream, SimpleQueue[_Pending | None]] = {}
        self._passed: list[tuple[_Lane, _Pending]] = []
        self._wake_pending = False
        self._closed = False
        self._lock = threading.Lock()

    def begin(self, lane: _Lane, pending: _Pending) -> None:
        queue = self._queues.get(lane.stream)
        if queue is None:
            queue = SimpleQueue()
            name = f"tiercache-{self._bridge.driver.name}-events-{len(self._queues)}"
            waiting = threading.Thread(target=self._run, args=(lane, queue), name=name, daemon=True)
            try:
                waiting.start()
            except RuntimeError:
                return  # no thread is left: the watch sees it
            self._queues[lane.stream] = queue
        pending.uses += 1
        queue.put(pending)

    def go_on(self, lane: _Lane) -> None: ...

    def end(self, pending: _Pending) -> None: ...

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for _, pending in self._take_passed():
            self._bridge.let_go(pending)
        for queue in self._queues.values():
            queue.put(None)

    def _run(self, lane: _Lane, queue: SimpleQueue[_Pending | None]) -> None:
        while (pending := queue.get()) is not None:
            # An error is found again, and told, by `settle`.
            with contextlib.suppress(DeviceError):
                self._bridge.driver.synchronize(pending.event)
            with self._lock:
                if self._closed:
                    self._bridge.let_go(pending)  # nobody else has it any more
                    continue
                self._passed.append((lane, pending))
                wake, self._wake_pending = not self._wake_pending, True
            if wake:
                try:
                    self._bridge.loop.call_soon_threadsafe(self._ready)
                except RuntimeError:
                    return  # the loop is closed

    def _take_passed(self) -> list[tuple[_Lane, _Pending]]:
        with self._lock:
            self._wake_pending = False
            passed, self._passed = self._passed, []
            return passed

    def _ready(self) -> None:
        lanes = set()
        for lane, pending in self._take_passed():
            lanes.add(lane)
            self._bridge.let_go(pending)
        for lane in lanes:
            self._bridge.settle(lane)


class _Polling:
    def __init__(self, bridge: EventBridge) -> None:
        self._bridge = bridge
        self._lanes: dict[Stream, _Lane] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = _FIRST_POLL_S

    def begin(self, lane: _Lane, pending: _Pending) -> None:
        self._lanes[lane.stream] = lane
        self._pause_s = _FIRST_POLL_S
        if self._timer is None:
            self._timer = self._bridge.loop.call_later(self._pause_s, self._poll)

    def go_on(self, lane: _Lane) -> None: ...

    def end(self, pending: _Pending) -> None: ...

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _poll(self) -> None:
        self._timer = None
        settled = [self._bridge.settle(lane) for lane in self._lanes.values()]
        self._pause_s = _FIRST_POLL_S if any(settled) else min(_SLOWEST_POLL_S, self._pause_s * _SLOWER)
        if any(lane.waiting for lane in self._lanes.values()):
            self._timer = self._bridge.loop.call_later(self._pause_s, self._poll)
