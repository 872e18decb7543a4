"""What goes wrong on command. Decided per operation when it is claimed from its ring, so in the order of arrival."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Action = Literal["errno", "short", "delay", "hold", "lose"]


@dataclass
class Fault:
    """`value` is the errno, the bytes to transfer at most, or the delay in s; "hold" and "lose" have none."""

    action: Action
    value: float = 0
    count: int | None = 1
    """How many operations it strikes; None: all, until it is cleared."""
    direction: Literal["read", "write"] | None = None
    """None: both."""


@dataclass
class CallFault:
    """A failing system call on the mount."""

    call: str
    errno: int
    count: int | None = 1


class Faults:
    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._active: list[Fault] = []
        self._hanging = False
        self._parked: list[Callable[[], None]] = []
        self._calls: list[CallFault] = []
        self.struck = 0

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._active.append(fault)

    def clear(self) -> None:
        """Forget all faults, and let everything go that hangs."""
        with self._lock:
            self._active.clear()
            self._calls.clear()
        self.resume()

    def next(self, for_read: bool) -> Fault | None:
        """The fault that strikes the next operation of this direction: the oldest that applies."""
        if not self._active:
            return None
        direction = "read" if for_read else "write"
        with self._lock:
            for fault in self._active:
                if fault.direction in (None, direction):
                    if fault.count is not None:
                        fault.count -= 1
                        if fault.count == 0:
                            self._active.remove(fault)
                    self._strike()
                    return fault
        return None

    def add_call(self, fault: CallFault) -> None:
        with self._lock:
            self._calls.append(fault)

    def check_call(self, call: str) -> None:
        """Raises OSError when a fault waits for this call."""
        if not self._calls:
            return
        with self._lock:
            for fault in self._calls:
                if fault.call == call:
                    if fault.count is not None:
                        fault.count -= 1
                        if fault.count == 0:
                            self._calls.remove(fault)
                    self._strike()
                    raise OSError(fault.errno, f"a fault was asked for: {call}")

    def _strike(self) -> None:
        self.struck += 1
        self._lock.notify_all()

    def until_struck(self, faults: int) -> None:
        """Wait until so many have struck."""
        with self._lock:
            self._lock.wait_for(lambda: self.struck >= faults)

    def hang(self) -> None:
        """From now on operations are claimed, and nothing happens to them."""
        with self._lock:
            self._hanging = True

    def hangs(self) -> bool:
        return self._hanging

    def resume(self) -> None:
        with self._lock:
            self._hanging = False
            parked, self._parked = self._parked, []
        for begin in parked:
            begin()

    def parks(self, begin: Callable[[], None]) -> bool:
        """Keep `begin` for later if everything hangs; else False, and the caller goes on."""
        if not self.hangs():
            return False
        with self._lock:
            if not self.hangs():
                return False
            self._parked.append(begin)
            self._lock.notify_all()
            return True

    def hold(self, begin: Callable[[], None]) -> None:
        """Keep `begin` until `resume`."""
        with self._lock:
            self._parked.append(begin)
            self._lock.notify_all()

    def until_hanging(self, operations: int) -> None:
        """Wait until so many operations hang."""
        with self._lock:
            self._lock.wait_for(lambda: len(self._parked) >= operations)
