"""What `threading` and `queue` offer, for strands: waits are the world's, and none of them blocks the real thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty
from typing import Any

from tests.torture.simulation.process import Killed
from tests.torture.simulation.world import Strand, World


class Threads:
    """The names that take the place of `threading`'s and `queue`'s, bound to one world."""

    def __init__(self, world: World, stumble: Callable[[], None] = lambda: None) -> None:
        """`stumble` is called where a thread may be interrupted: it may pause."""

        class Thread(_Thread):
            _world = world

        class Lock(_Lock):
            _world = world

        class BoundedSemaphore(_Semaphore):
            _world = world

        class Event(_Event):
            _world = world

        class SimpleQueue(_SimpleQueue):
            _world = world
            _stumble = staticmethod(stumble)

        class local(_Local):
            _world = world

        self.Thread = Thread
        self.Lock = self.RLock = Lock
        self.Semaphore = self.BoundedSemaphore = BoundedSemaphore
        self.Event = Event
        self.SimpleQueue = SimpleQueue
        self.local = local


class _Waiting:
    """Strands that wait for one thing, in their order."""

    __slots__ = ("_strands", "_world")

    def __init__(self, world: World) -> None:
        self._world = world
        self._strands: deque[Strand] = deque()

    def wait(self, until_s: float | None) -> None:
        """The current strand, until `wake_one` chooses it or that time; there is no telling which from here."""
        strand = self._world.current
        if strand is None:
            raise AssertionError("a wait outside of every strand: it would never end")
        self._strands.append(strand)
        try:
            self._world.wait(until_s)
        finally:
            if strand in self._strands:
                self._strands.remove(strand)

    def wake_one(self) -> None:
        while self._strands:
            strand = self._strands.popleft()
            if strand.process.alive:
                self._world.wake(strand)
                return

    def wake_all(self) -> None:
        while self._strands:
            self._world.wake(self._strands.popleft())


def _until_s(world: World, timeout: float | None) -> float | None:
    return None if timeout is None or timeout < 0 else world.now_s + timeout


class _Lock:
    _world: World

    def __init__(self) -> None:
        self._owner: object = None
        self._depth = 0
        self._waiting = _Waiting(self._world)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        owner = self._world.current
        if self._owner is not None and self._owner is owner:  # only an RLock comes here twice
            self._depth += 1
            return True
        until_s = _until_s(self._world, timeout)
        while self._depth:
            if not blocking or (until_s is not None and self._world.now_s >= until_s):
                return False
            self._waiting.wait(until_s)
        self._owner = owner
        self._depth = 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._waiting.wake_one()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class _Semaphore:
    _world: World

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._waiting = _Waiting(self._world)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        until_s = _until_s(self._world, timeout)
        while not self._value:
            if not blocking or (until_s is not None and self._world.now_s >= until_s):
                return False
            self._waiting.wait(until_s)
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        for _ in range(n):
            self._waiting.wake_one()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class _Event:
    _world: World

    def __init__(self) -> None:
        self._set = False
        self._waiting = _Waiting(self._world)

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiting.wake_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        until_s = _until_s(self._world, timeout)
        while not self._set and (until_s is None or self._world.now_s < until_s):
            self._waiting.wait(until_s)
        return self._set


class _SimpleQueue:
    _world: World
    _stumble: Callable[[], None]

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting = _Waiting(self._world)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._waiting.wake_one()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """A thread that has taken something is interrupted before it looks at it."""
        until_s = _until_s(self._world, timeout)
        while not self._items:
            if not block or (until_s is not None and self._world.now_s >= until_s):
                raise Empty
            self._waiting.wait(until_s)
        item = self._items.popleft()
        if block:
            self._stumble()
        return item

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


class _Thread:
    _world: World

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target = target
        self._arguments = args
        self._named = kwargs or {}
        self.name = name or "thread"
        self.daemon = daemon
        self._strand: Strand | None = None

    def start(self) -> None:
        current = self._world.current
        assert current is not None
        process = current.process
        if not process.alive:
            raise Killed
        if process.no_threads:
            raise RuntimeError("can't start new thread")
        self._strand = self._world.start(process, self.name, self.run)

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._arguments, **self._named)

    def join(self, timeout: float | None = None) -> None:
        strand, current = self._strand, self._world.current
        assert strand is not None and current is not None
        until_s = _until_s(self._world, timeout)
        strand.joined.append(current)
        while not strand.ended and (until_s is None or self._world.now_s < until_s):
            self._world.wait(until_s)

    def is_alive(self) -> bool:
        return self._strand is not None and not self._strand.ended


class _Local:
    """Attributes of a strand's own."""

    _world: World

    def _values(self) -> dict[str, Any]:
        strand = object.__getattribute__(self, "_world").current
        if strand is None:
            raise AssertionError("thread-local storage outside of every strand")
        values: dict[str, Any] = strand.local.setdefault(id(self), {})
        return values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values()[name] = value
