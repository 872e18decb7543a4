"""What a test may leave behind, and does not: threads, descriptors, tasks, children, slots, leases, shared memory, mounts.

`tests/conftest.py` compares each test's end with its beginning. Other processes have shared memory and mounts, too. What
is new is this test's when this process made it or told a child of it (`tests/made.py`), when its name has this process's
number in it, when this process has it open, or (a mount) when it lies in this run's directories.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.made import SHARED_MEMORY, forget_what_was_made, is_our_place, is_ours
from tests.servers.ports import held_ports
from tiercache.memory.slots import Purpose, SlotBudget
from tiercache.tiers.cpu import CpuTier

PATIENCE_S = 5.0
"""What is about to end gets so long: threads that were told to, memory that an error's frames still keep."""
_MOUNTS = Path("/proc/self/mountinfo")
_OUR_NUMBER = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")

Leaks = dict[str, list[str]]
"""Kind to one line each."""


@dataclass(frozen=True)
class _Slots:
    """The hot cache's (or the device pool's) books, without the memory that they are about."""

    budget: SlotBudget
    tier: weakref.ref[CpuTier]
    made_at: str


_watched: list[_Slots] = []


def watch_slots() -> None:
    """From now on, every tier with slots is known to the tests' end. Called once."""
    begin = CpuTier.__init__

    def watched(self: CpuTier, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        _watched.append(_Slots(self.budget, weakref.ref(self), _caller()))

    CpuTier.__init__ = watched  # type: ignore[method-assign]


@dataclass(frozen=True)
class Held:
    """What this process has at one moment."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[str]
    shared_memory: frozenset[str]
    """All files there, also of other programs."""
    mounts: frozenset[str]
    """As for shared memory."""
    children: frozenset[str]
    """Numbers; those that have ended and were not waited for are left out."""
    slots: int
    """How many of the watched tiers are older."""

    @classmethod
    def now(cls, lasting: str = "$^") -> Held:
        return cls(
            frozenset(threading.enumerate()),
            frozenset(one for one in _descriptors() if not re.search(lasting, one)),
            frozenset(os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ()),
            frozenset(_MOUNTS.read_text().splitlines()),
            frozenset(_children()),
            len(_watched),
        )

    def leaks_of(self, later: Held, run_directory: str) -> Leaks:
        """What is there later, was not there now, and is ours. Mounts in `run_directory` are."""
        found = {
            "threads": [_where(thread) for thread in later.threads - self.threads],
            "descriptors": sorted(later.descriptors - self.descriptors),
            "children": [_what_runs(number) for number in sorted(later.children - self.children)],
            "shared memory": sorted(name for name in later.shared_memory - self.shared_memory if later.has(name)),
            "mounts": sorted(line for line in later.mounts - self.mounts if _is_our_mount(line, run_directory)),
            "slots and leases": [line for slots in _watched[self.slots :] for line in _held_slots(slots)],
        }
        return {kind: lines for kind, lines in found.items() if lines}

    def has(self, entry: str) -> bool:
        """Whether an entry of /dev/shm is this process's."""
        is_open = any(f"{SHARED_MEMORY}/{entry}" in one for one in self.descriptors)
        return is_open or is_ours(entry) or _OUR_NUMBER.search(entry) is not None


@contextmanager
def nothing_left(
    run_directory: str,
    runner: asyncio.Runner | None = None,
    forget_errors: Callable[[], None] = lambda: None,
    patience_s: float = PATIENCE_S,
    lasting: str = "$^",
) -> Iterator[None]:
    """Raises AssertionError at the end of the block unless everything that began in it has ended, or ends soon.

    `runner` is the test's event loop; `forget_errors` lets go of logged exceptions, which keep frames, which keep memory;
    `lasting` is a pattern for descriptors that libraries keep.
    """
    forget_what_was_made()
    before = Held.now(lasting)
    yield
    until_s = time.monotonic() + patience_s
    leaks: Leaks = {} if runner is None else _end_loop(runner, patience_s)
    leaks |= _leaks_since(before, run_directory, lasting, until_s)
    if leaks.keys() - {"tasks"}:
        forget_errors()
        while leaks.keys() - {"tasks"} and time.monotonic() < until_s:
            gc.collect()
            if runner is not None:
                runner.run(asyncio.sleep(0))  # what threads and freed objects have told the loop
            leaks = {kind: lines for kind, lines in leaks.items() if kind == "tasks"}
            leaks |= _leaks_since(before, run_directory, lasting, until_s)
    del _watched[before.slots :]
    assert not leaks, "the test left behind:\n" + "\n".join(
        f"  {kind}:\n" + "\n".join(f"    {line}" for line in lines) for kind, lines in leaks.items()
    )


def _leaks_since(before: Held, run_directory: str, lasting: str, until_s: float) -> Leaks:
    """Threads that were told to end are waited for: they may hold the rest."""
    for thread in frozenset(threading.enumerate()) - before.threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return before.leaks_of(Held.now(lasting), run_directory)


def _end_loop(runner: asyncio.Runner, patience_s: float) -> Leaks:
    """Tasks that have not ended; what the loop itself would end with it (the threads of `to_thread`) is ended."""
    loop = runner.get_loop()
    tasks = asyncio.all_tasks(loop)
    if tasks:
        _, tasks = runner.run(asyncio.wait(tasks, timeout=patience_s))
    with contextlib.suppress(TimeoutError):
        runner.run(asyncio.wait_for(loop.shutdown_default_executor(), patience_s))
    return {"tasks": [repr(task) for task in tasks]} if tasks else {}


def _descriptors() -> Iterator[str]:
    ports = {str(each.fileno()) for each in held_ports}
    for name in os.listdir("/proc/self/fd"):
        if name in ports:
            continue  # until this process ends
        try:
            yield f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}"
        except FileNotFoundError:
            continue  # the one that reads this directory


def _children() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended; a kernel that does not say
            for number in Path(f"/proc/self/task/{task}/children").read_text().split():
                if not _has_ended(number):
                    yield number


def _has_ended(number: str) -> bool:
    """A child that nobody has waited for yet keeps its number and nothing else."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _what_runs(number: str) -> str:
    try:
        command = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = ""
    return f"{number}: {command[:200]}"


def _is_our_mount(line: str, run_directory: str) -> bool:
    """`line` is of mountinfo(5)."""
    point = line.split()[4].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")
    return f"{run_directory}/" in line or is_our_place(point) or _OUR_NUMBER.search(point) is not None


def _held_slots(slots: _Slots) -> Iterator[str]:
    held = slots.budget.held
    tier = slots.tier()
    if any(held):
        counts = ", ".join(f"{count} for {purpose.name}" for purpose, count in zip(Purpose, held, strict=True) if count)
        keys = [entry.key.hex()[:12] for entry in (tier._entries.values() if tier else ()) if entry.leases]
        chunks = f"; leases on {', '.join(keys)}" if keys else ""
        yield f"{counts}{chunks}, of the tier made at {slots.made_at}"
    elif tier is not None and tier.pool.free and tier.obtainable != tier.pool.count:
        yield f"{tier.pool.count - tier.obtainable} slots that nobody holds, of the tier made at {slots.made_at}"


def _where(thread: threading.Thread) -> str:
    """Its name, and what it is at."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return thread.name
    inner = traceback.extract_stack(frame)[-4:]
    return f"{thread.name}, at " + " > ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in inner)


def _caller() -> str:
    """The innermost line of a test that led here."""
    frame = sys._getframe(2)
    first = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    while frame is not None:
        if "/tests/" in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return first
