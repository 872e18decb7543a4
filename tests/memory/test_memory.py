"""The arena in its three kinds, slots, and the threads that touch them."""

import asyncio
import errno
import gc
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tiercache import Config, Layout, TierCache
from tiercache.errors import CacheClosed, ConfigError, TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings, numa_node_for
from tiercache.memory.slots import FEWEST_SLOTS, SlotPool
from tiercache.memory.workers import Workers, wait_shielded

SIZE = 8 << 20


@pytest.fixture
def shm_name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    (Path("/dev/shm") / f"tiercache.{name}").unlink(missing_ok=True)


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("test", 2)
    yield workers
    workers.close()


def test_huge_pages_that_are_not_to_be_had_fall_back_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    if int(Path("/proc/sys/vm/nr_hugepages").read_text()):
        pytest.skip("this machine has huge pages reserved")
    arena = Arena(ArenaSettings(size_bytes=SIZE, hugepages=True))
    assert arena.kind == "thp"
    assert "sysctl vm.nr_hugepages=4" in caplog.text
    arena.close()


def test_huge_pages_are_used_when_reserved() -> None:
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()
    try:
        setting.write_text("8")
    except OSError:
        pytest.skip("reserving huge pages needs privileges that this user lacks")
    try:
        if int(setting.read_text()) < 8:
            pytest.skip("this machine has no memory for huge pages")
        arena = Arena(ArenaSettings(size_bytes=SIZE, hugepages=True))
        assert arena.kind == "hugetlb"
        arena.memory[-1] = 1
        arena.close()
    finally:
        setting.write_text(before)


def test_shared_memory_is_visible_by_name_and_gone_after_close(shm_name: str) -> None:
    arena = Arena(ArenaSettings(size_bytes=SIZE, shm_name=shm_name))
    path = Path("/dev/shm") / f"tiercache.{shm_name}"
    arena.memory[:4] = [1, 2, 3, 4]
    assert path.read_bytes()[:4] == b"\1\2\3\4"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="in use by a living process"):
        Arena(ArenaSettings(size_bytes=SIZE, shm_name=shm_name))
    arena.close()
    assert not path.exists()


def test_numa_modes() -> None:
    assert numa_node_for(None) is None
    assert numa_node_for("auto") in (None, *range(os.cpu_count() or 1))
    with pytest.raises(ConfigError, match="numa_mode: expected 'auto'"):
        numa_node_for("banana")


@pytest.mark.parametrize("kind", ["thp", "shm"])
def test_memory_that_a_limit_refuses_is_one_sentence_and_leaves_nothing(kind: str, shm_name: str) -> None:
    name = shm_name if kind == "shm" else None
    program = (
        "import resource; from tiercache.errors import ConfigError; from tiercache.memory.arena import *\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "try:\n"
        f"    Arena(ArenaSettings(size_bytes={256 << 20}, shm_name={name!r}))\n"
        "except ConfigError as error:\n"
        "    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("max_local_cpu_size: 0.25 GB of memory cannot be reserved (Cannot allocate memory)")
    assert not (Path("/dev/shm") / f"tiercache.{shm_name}").exists()


def test_memory_that_gives_out_while_touched_is_given_back(shm_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def populate(part: np.ndarray) -> bool:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("tiercache.memory.arena._populate", populate)
    gc.disable()
    try:
        with pytest.raises(ConfigError, match="cannot be reserved"):
            Arena(ArenaSettings(size_bytes=SIZE, shm_name=shm_name))
        assert shm_name not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_slots_are_aligned_disjoint_and_all_there() -> None:
    pool = SlotPool(Arena(ArenaSettings(size_bytes=SIZE)), 100_000)
    slots = [pool.take() for _ in range(pool.count)]
    assert pool.take() is None
    starts = set()
    for slot in slots:
        assert slot is not None
        view = pool.view(slot)
        assert view.ctypes.data % 4096 == 0
        starts.add(view.ctypes.data)
        view[:] = slot % 256
    assert len(starts) == pool.count == SIZE // 102_400
    assert all((pool.view(slot) == slot % 256).all() for slot in slots if slot is not None)


def test_what_is_read_of_a_slot_is_its_own_memory_and_cannot_be_written() -> None:
    pool = SlotPool(Arena(ArenaSettings(size_bytes=SIZE)), 100_000)
    view = pool.readable(3, 50_000)
    pool.view(3)[:] = 7
    assert view.nbytes == 50_000 and (view == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    pool.close()
    assert (view == 7).all(), "who has it keeps it"
    for take in (pool.view, pool.readable):
        with pytest.raises(CacheClosed):
            take(3, 50_000)


async def test_workers_return_results_and_exceptions(workers: Workers) -> None:
    assert await asyncio.gather(*(workers.submit(pow, 2, n) for n in range(100))) == [2**n for n in range(100)]
    with pytest.raises(ZeroDivisionError):
        await workers.submit(lambda: 1 / 0)
    assert workers.unfinished == 0


async def test_call_that_raises_what_futures_refuse_ends_all_the_same() -> None:
    workers = Workers("test", 1)
    empty: list[int] = []
    calls = [workers.submit(next, iter(empty)), workers.submit(int, 7)]
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(calls[0], 10)
    assert await asyncio.wait_for(calls[1], 10) == 7
    workers.close()


def test_what_was_submitted_is_done_though_the_loop_is_closed() -> None:
    """It may give back what others wait for."""
    workers = Workers("test", 1)
    go_on, done = threading.Event(), threading.Event()

    async def main() -> None:
        workers.submit(go_on.wait)
        workers.submit(done.set)
        workers.close()

    asyncio.run(main())
    go_on.set()
    assert done.wait(10)


async def test_hung_call_occupies_one_thread_and_nothing_else(workers: Workers) -> None:
    release = threading.Event()
    hung = workers.submit(release.wait)
    assert await workers.submit(lambda: "others go on") == "others go on"
    hung.cancel()
    assert workers.unfinished == 1
    release.set()
    while workers.unfinished:
        await asyncio.sleep(0)


async def test_cancelling_many_times_still_waits_for_work_on_foreign_memory(workers: Workers) -> None:
    release, memory = threading.Event(), np.zeros(4, np.uint8)

    def write_late() -> None:
        release.wait()
        memory[:] = 1

    waiting = asyncio.create_task(wait_shielded(workers.submit(write_late)))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert memory.all()


def test_workers_with_a_hung_call_do_not_hang_the_interpreters_exit() -> None:
    program = (
        "import asyncio, threading; from tiercache.memory.workers import Workers\n"
        "async def main():\n"
        "    Workers('hung', 1).submit(threading.Event().wait)\n"
        "    print('leaving')\n"
        "asyncio.run(main())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert run.stdout == "leaving\n"


@pytest.mark.parametrize("chunk_bytes", [1_179_648, 1_400_000, 2_000_000])
def test_what_is_said_to_be_enough_is_and_is_more_than_there_was(chunk_bytes: int) -> None:
    with pytest.raises(ConfigError, match="raise it to") as refused:
        SlotPool(Arena(ArenaSettings(size_bytes=4 << 20)), chunk_bytes)
    (found,) = re.findall(r"max_local_cpu_size: (.*) GB.*raise it to (.*) or more", str(refused.value))
    had_gb, enough_gb = map(float, found)
    assert enough_gb > had_gb
    pool = SlotPool(Arena(ArenaSettings(size_bytes=int(enough_gb * 2**30))), chunk_bytes)
    assert pool.count >= FEWEST_SLOTS


# When the machine has no thread left: the limit of processes, or of memory, is reached


@contextmanager
def no_thread_to_be_had() -> Iterator[None]:
    """The system refuses a thread with so large a stack, as it does when its limit is reached."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


async def test_threads_that_there_are_run_the_calls_of_those_that_could_not_start() -> None:
    workers = Workers("test", 4)
    go_on = threading.Event()
    first = workers.submit(go_on.wait)
    with no_thread_to_be_had():
        others = [workers.submit(int, number) for number in range(5)]
    go_on.set()
    assert await asyncio.wait_for(asyncio.gather(first, *others), 60) == [True, *range(5)]
    assert workers.unfinished == 0
    workers.close()


async def test_put_while_no_thread_can_start_fails_at_once_holds_nothing_and_later_ones_store() -> None:
    layout = Layout("test-model", chunk_tokens=64, bytes_per_token=1024)
    config = Config.load(environ={}, overrides={"max_local_cpu_size": 2 / 1024})
    async with TierCache.open(config, layout) as cache:
        keys = [number.to_bytes(24, "big") for number in range(4)]
        with no_thread_to_be_had():
            for key in keys[:3]:
                with pytest.raises(TierUnavailable, match="no thread"):
                    await asyncio.wait_for(cache.put(key, bytearray(65536), deadline_s=1.0), 60)
        assert cache.cpu.obtainable == cache.cpu.pool.count
        assert await asyncio.wait_for(cache.put(keys[3], bytearray(65536), deadline_s=1.0), 60)


def test_arena_is_touched_by_the_threads_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    with no_thread_to_be_had():
        arena = Arena(ArenaSettings(size_bytes=256 << 20))
    assert arena.memory.nbytes == 256 << 20
    arena.close()
