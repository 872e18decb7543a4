"""The watch for leaks sees each kind, says where it is from, and waits for what is about to end."""

import asyncio
import os
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.leaks import Held, nothing_left
from tiercache.core.budget import Purpose
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.slots import SlotPool
from tiercache.memory.workers import Workers
from tiercache.testing import chunk
from tiercache.tiers.cpu import CpuTier

CHUNK_BYTES = 4096


def thread(clean: ExitStack) -> None:
    end = threading.Event()
    started = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    started.start()
    clean.callback(started.join)
    clean.callback(end.set)


def descriptor(clean: ExitStack) -> None:
    reading, writing = os.pipe()
    clean.callback(os.close, reading)
    clean.callback(os.close, writing)


def shared_memory(clean: ExitStack) -> None:
    path = Path(f"/dev/shm/leak-{os.getpid()}")
    path.touch()
    clean.callback(path.unlink)


def tier(clean: ExitStack) -> CpuTier:
    arena = Arena(ArenaSettings(size_bytes=8 * CHUNK_BYTES))
    clean.callback(arena.close)
    return CpuTier(SlotPool(arena, CHUNK_BYTES), Workers("copy", 1))


def slot(clean: ExitStack) -> None:
    cpu = tier(clean)
    taken = cpu.try_reserve(Purpose.READ)
    assert taken is not None
    clean.callback(cpu.abandon, taken, Purpose.READ)


def lease(clean: ExitStack) -> None:
    cpu = tier(clean)
    taken = cpu.try_reserve(Purpose.WRITE)
    assert taken is not None
    clean.callback(cpu.publish(chunk(7)[0], taken, CHUNK_BYTES, Purpose.WRITE).release)


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (thread, r"threads:\n    forgotten, at .*threading\.py"),
        (descriptor, r"descriptors:\n    \d+ -> pipe:"),
        (shared_memory, rf"shared memory:\n    leak-{os.getpid()}$"),
        (slot, r"slots and leases:\n    1 for READ, of the tier made at .*test_leaks\.py:\d+"),
        (
            lease,
            rf"slots and leases:\n    1 for WRITE; leases on {chunk(7)[0].hex()[:12]}, of the tier made at .*test_leaks\.py",
        ),
    ],
    ids=["thread", "descriptor", "shared memory", "slot", "lease"],
)
def test_what_is_left_behind_is_named(leave: Callable[[ExitStack], None], said: str, tmp_path: Path) -> None:
    with ExitStack() as clean:
        with pytest.raises(AssertionError) as caught, nothing_left(str(tmp_path), patience_s=0.0):
            leave(clean)
        assert re.search(said, str(caught.value), re.MULTILINE), str(caught.value)


def test_a_task_that_goes_on_is_named(tmp_path: Path) -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    async def forgets() -> asyncio.Task[None]:
        return asyncio.create_task(for_ever())

    with asyncio.Runner() as runner:
        with pytest.raises(AssertionError, match="for_ever"), nothing_left(str(tmp_path), runner, patience_s=0.0):
            task = runner.run(forgets())
        task.cancel()


def test_what_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    async def last_words(told: threading.Event) -> None:
        await asyncio.sleep(0.01)
        told.set()

    async def begins(told: threading.Event) -> asyncio.Task[None]:
        return asyncio.create_task(last_words(told))

    with asyncio.Runner() as runner, nothing_left(str(tmp_path), runner):
        told = threading.Event()
        threading.Thread(target=told.wait).start()
        task = runner.run(begins(told))
    assert task.done()


def test_a_mount_is_seen_below_the_runs_own_directory_only(tmp_path: Path) -> None:
    anywhere = Path("/proc/self/mountinfo").read_text().splitlines()[-1].split()[4]
    assert Held.now(anywhere).mounts
    assert not Held.now(str(tmp_path)).mounts


def test_what_was_there_before_is_no_leak(tmp_path: Path) -> None:
    with ExitStack() as clean:
        for leave in (thread, descriptor, shared_memory, slot, lease):
            leave(clean)
        with nothing_left(str(tmp_path), patience_s=0.0):
            pass
