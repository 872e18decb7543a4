"""The watch for leaks sees each kind, says where it is from, and waits for what is about to end."""

import asyncio
import os
import random
import re
import shutil
import string
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests.leaks import nothing_left
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.slots import Purpose, SlotPool
from tiercache.memory.workers import Workers
from tiercache.testing import chunk
from tiercache.tiers.cpu import CpuTier

CHUNK_BYTES = 4096
RUN = "".join(random.choices(string.ascii_lowercase, k=8))
"""In the names of shared memory, so that what a killed run has left is not in the way of the next one."""


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


def unnumbered_shared_memory(clean: ExitStack) -> None:
    """As an arena that forgot its file: closed, and nobody's number in its name."""
    path = Path(f"/dev/shm/tiercache.left-closed-{RUN}")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    clean.callback(path.unlink)


def shared_memory_of_python(clean: ExitStack) -> None:
    one = SharedMemory(f"left-by-python-{RUN}", create=True, size=4096)
    one.close()
    clean.callback(one.unlink)


def shared_memory_of_a_child(clean: ExitStack) -> None:
    """It was told the name, made the entry and died."""
    path = Path(f"/dev/shm/tiercache.left-by-a-child-{RUN}")
    subprocess.run(["sh", "-c", f": >/dev/shm/tiercache.$1 # {path.name}", "sh", f"left-by-a-child-{RUN}"], check=True)
    clean.callback(path.unlink)


def child(clean: ExitStack) -> None:
    started = subprocess.Popen(["sleep", "1000"])
    clean.callback(started.wait)
    clean.callback(started.kill)
    while not Path(f"/proc/{started.pid}/cmdline").read_bytes():
        pass  # the kernel names a new program a moment after `Popen` knows that it runs


def tier(clean: ExitStack) -> CpuTier:
    arena = Arena(ArenaSettings(size_bytes=8 * CHUNK_BYTES))
    clean.callback(arena.close)
    return CpuTier(SlotPool(arena, CHUNK_BYTES), Workers("copy", 1))


def slot(clean: ExitStack) -> None:
    cpu = tier(clean)
    taken = cpu.try_reserve(Purpose.READ)
    clean.callback(cpu.abandon, taken, Purpose.READ)


def lease(clean: ExitStack) -> None:
    cpu = tier(clean)
    taken = cpu.try_reserve(Purpose.WRITE)
    clean.callback(cpu.publish(chunk(7)[0], taken, CHUNK_BYTES, Purpose.WRITE).release)


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (thread, r"threads:\n    forgotten, at .*threading\.py"),
        (descriptor, r"descriptors:\n    \d+ -> pipe:"),
        (shared_memory, rf"shared memory:\n    leak-{os.getpid()}$"),
        (unnumbered_shared_memory, rf"shared memory:\n    tiercache\.left-closed-{RUN}$"),
        (shared_memory_of_python, rf"shared memory:\n    left-by-python-{RUN}$"),
        (shared_memory_of_a_child, rf"shared memory:\n    tiercache\.left-by-a-child-{RUN}$"),
        (child, r"children:\n    \d+: sleep 1000$"),
        (slot, r"slots and leases:\n    1 for READ, of the tier made at .*test_leaks\.py:\d+"),
        (
            lease,
            rf"slots and leases:\n    1 for WRITE; leases on {chunk(7)[0].hex()[:12]}, of the tier made at .*test_leaks\.py",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
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


@pytest.mark.needs("mount")
@pytest.mark.parametrize("where", ["in the run's directories", "elsewhere"])
def test_a_mount_is_named_wherever_it_is(where: str, tmp_path: Path) -> None:
    with (
        ExitStack() as clean,
        pytest.raises(AssertionError, match=r"mounts:\n.* tmpfs "),
        nothing_left(str(tmp_path), patience_s=0.0),
    ):
        place = str(tmp_path) if where != "elsewhere" else tempfile.mkdtemp(prefix="mount-")
        if where == "elsewhere":
            clean.callback(shutil.rmtree, place)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "leak", "."], cwd=place, check=True)
        clean.callback(subprocess.run, ["umount", place], check=True)


@pytest.mark.parametrize("looked_at", [False, True], ids=["unseen", "looked-at"])
def test_what_others_make_is_no_leak(looked_at: bool, tmp_path: Path) -> None:
    """Another program, which was there before, makes shared memory under a name that could be ours.

    Looked at: an arena of ours begins, and looks for those of dead processes.
    """
    path = Path("/dev/shm/tiercache.of-somebody-else")
    script = (
        f"import fcntl, sys; sys.stdin.readline(); made = open({str(path)!r}, 'w'); fcntl.flock(made, fcntl.LOCK_EX); "
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(["python3", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        with nothing_left(str(tmp_path), patience_s=0.0):
            other.stdin.write(b"\n")
            other.stdin.flush()
            other.stdout.readline()
            if looked_at:
                Arena(ArenaSettings(size_bytes=1, shm_name=f"looks-{os.getpid()}")).close()
        os.unlink(path)
