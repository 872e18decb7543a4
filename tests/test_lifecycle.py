"""Opening, filling and closing a cache when something hangs, fails, or is cancelled: by a deadline, and nothing is kept."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.needs import needs_fuse
from tests.remote.fs.mount import FragileMount
from tests.scheduler.conftest import release
from tests.test_cache import CHUNK_BYTES, LAYOUT, configured, key, payload, until
from tiercache import ConfigError, TierCache
from tiercache.errors import CacheClosed, TierCacheError
from tiercache.memory.slots import Lease
from tiercache.tiers.disk import DiskTier


@pytest.fixture
def arena_file() -> Iterator[Path]:
    """There while a cache made by `started` holds its arena."""
    path = Path("/dev/shm") / f"tiercache.test-{uuid.uuid4().hex}"
    yield path
    assert not path.exists()


async def started(directory: Path | None, arena_file: Path, **values: object) -> TierCache:
    cache = TierCache(configured(directory, shm_name=arena_file.name.removeprefix("tiercache."), **values), LAYOUT)
    await cache.start()
    return cache


@pytest.fixture
def held() -> Iterator[list[Lease]]:
    """Leases that a test takes, and that end with it."""
    leases: list[Lease] = []
    yield leases
    release(*leases)


async def put_that_waits(cache: TierCache, held: list[Lease]) -> asyncio.Task[bool]:
    """A put for which no slot comes free: `close` waits for it."""
    for number in range(cache.cpu.pool.count):
        assert await cache.put(key(number), payload(number))
        held.append(cache.cpu.lease(key(number)))
    assert (await cache.flush()).complete, "a write that goes on would keep the memory mapped"
    waiting = asyncio.create_task(cache.put(key(998), payload(998), deadline_s=60.0))
    await asyncio.sleep(0)
    return waiting


async def closing_began() -> None:
    await until(lambda: any(task.get_name() == "tiercache-close" for task in asyncio.all_tasks()))


def mapped(arena_file: Path) -> int:
    """How often this process has it mapped, deleted or not."""
    return Path("/proc/self/maps").read_text().count(arena_file.name)


def unmapped(arena_file: Path) -> bool:
    """Tracebacks of writes that failed have to be collected."""
    gc.collect()
    return not mapped(arena_file)


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tiercache-")}


@needs_fuse
async def test_close_above_a_hung_disk_takes_its_time_out_once_and_gives_the_memory_back_when_the_disk_goes_on(
    tmp_path: Path, arena_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FragileMount(tmp_path) as mount:
        cache = await started(mount.path, arena_file)
        mount.hang()
        for number in range(8):
            assert await cache.put(key(number), payload(number))
        waiting = asyncio.create_task(cache.put_from([(key(9), CHUNK_BYTES, lambda into: time.sleep(1.5))]))
        await asyncio.sleep(0)
        began_s = time.monotonic()
        report = await cache.close(1.0)
        assert time.monotonic() - began_s < 20.0
        assert not report.complete
        assert mapped(arena_file), "a hung write may still read it"
        await asyncio.gather(waiting, return_exceptions=True)
        mount.go_on()
        await until(lambda: unmapped(arena_file))
    gc.collect()
    await asyncio.sleep(0)
    assert not [record for record in caplog.records if record.name == "asyncio"], "exceptions that nobody retrieved"


async def test_cancelled_close_gives_everything_back_and_says_so(
    tmp_path: Path, arena_file: Path, held: list[Lease]
) -> None:
    cache = await started(tmp_path, arena_file)
    waiting = await put_that_waits(cache, held)
    closing = asyncio.create_task(cache.close(60.0))
    await closing_began()
    began_s = time.monotonic()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert time.monotonic() - began_s < 20.0
    with pytest.raises(CacheClosed):
        await waiting
    await until(lambda: not arena_file.exists())
    async with TierCache.open(configured(tmp_path), LAYOUT) as again:
        assert again.statistics().tiers["disk"].strays == 0


async def test_cache_keeps_nothing_if_its_loop_ends_in_a_close(tmp_path: Path, arena_file: Path, held: list[Lease]) -> None:
    def whole_program() -> None:
        async def main() -> None:
            cache = await started(tmp_path, arena_file)
            await put_that_waits(cache, held)
            closing = asyncio.create_task(cache.close(60.0))
            await closing_began()
            assert not closing.done()

        asyncio.run(main())

    await asyncio.to_thread(whole_program)
    assert not arena_file.exists()


async def test_closes_share_the_nearest_deadline_and_the_report(tmp_path: Path, arena_file: Path, held: list[Lease]) -> None:
    cache = await started(tmp_path, arena_file)
    await put_that_waits(cache, held)
    began_s = time.monotonic()
    first = asyncio.create_task(cache.close(60.0))
    await asyncio.sleep(0.05)
    impatient = asyncio.create_task(cache.close(30.0))
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    await asyncio.sleep(0.05)
    assert not first.done(), "another caller still waits for the write"
    reports = await asyncio.gather(first, cache.close(0.2), cache.close())
    assert time.monotonic() - began_s < 20.0
    assert reports[0] is reports[1] is reports[2]
    assert await cache.close() is reports[0]


async def test_started_twice_is_an_error_and_takes_nothing() -> None:
    cache = TierCache(configured(), LAYOUT)
    await cache.start()
    assert await cache.put(key(1), payload(1))
    threads = own_threads()
    with pytest.raises(TierCacheError, match="started already"):
        await cache.start()
    assert own_threads() <= threads
    assert cache.lookup_hot([key(1)]) == 1
    await cache.close()
    with pytest.raises(TierCacheError, match="started already"):
        await cache.start()


async def test_start_that_fails_at_the_end_keeps_nothing_and_may_be_tried_again(tmp_path: Path, arena_file: Path) -> None:
    before = own_threads()
    name = arena_file.name.removeprefix("tiercache.")
    sockets = tmp_path / "sockets"
    config = configured(tmp_path / "disk", shm_name=name, control_socket=str(sockets / "control"))
    cache = TierCache(config, LAYOUT)
    with pytest.raises(ConfigError, match="control_socket"):
        await cache.start()
    assert not arena_file.exists()
    await until(lambda: own_threads() <= before)
    with pytest.raises(CacheClosed):
        await cache.put(key(1), payload(1))
    sockets.mkdir()
    await cache.start()
    assert await cache.put(key(1), payload(1))
    await cache.close()


@needs_fuse
@pytest.mark.parametrize("option", ["local_disk", "gds_path"])
async def test_disk_that_hangs_at_the_start_is_one_sentence_by_a_deadline_and_keeps_nothing(
    tmp_path: Path, arena_file: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskTier, "open_s", 1.0)
    monkeypatch.setattr("tiercache.lifecycle.FILE_SYSTEMS_S", 1.0)
    values: dict[str, object] = {"max_local_disk_size": 0.1}
    if option == "gds_path":
        values = {"max_gds_size": 0.1, "gds_buffer_size": 8, "device": "cpu"}
    with FragileMount(tmp_path) as mount:
        mount.hang()
        began_s = time.monotonic()
        with pytest.raises(ConfigError, match=rf"{option}.*{mount.path}.*within 1 s"):
            await started(None, arena_file, **{option: str(mount.path), **values})
        assert time.monotonic() - began_s < 20.0
        mount.go_on()
        await until(lambda: not arena_file.exists())


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.needs("root")
def test_cache_that_can_start_no_thread_is_one_clear_error(tmp_path: Path) -> None:
    """The limit of threads does not hold for root, and only root can become another user."""
    program = (
        "import asyncio, os, resource, sys; from pathlib import Path\n"
        "from tests.test_cache import LAYOUT, configured; from tiercache import CacheThread, ConfigError, TierCache\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))\n"
        "async def main():\n"
        "    async with TierCache.open(configured(None), LAYOUT): print('open')\n"
        "for open_it in (lambda: asyncio.run(main()), lambda: CacheThread(configured(None), LAYOUT)):\n"
        "    try: open_it()\n"
        "    except ConfigError as error: print('ulimit' in str(error))\n"
    )
    ended = run(program)
    assert ended.stdout == "True\nTrue\n", ended.stderr


@needs_fuse
def test_program_ends_though_its_disk_hung_at_the_start(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from tests.test_cache import LAYOUT, configured; from tiercache import TierCache\n"
        "from tiercache.tiers.disk import DiskTier; from pathlib import Path\n"
        "DiskTier.open_s = 0.5\n"
        "async def main():\n"
        "    async with TierCache.open(configured(Path(sys.argv[1])), LAYOUT): pass\n"
        "asyncio.run(main())"
    )
    with FragileMount(tmp_path) as mount:
        mount.hang()
        said = run(program, mount.path).stderr
        assert said.splitlines()[-1].startswith("tiercache.errors.ConfigError: local_disk: disk (")
        mount.go_on()


def test_start_that_nobody_runs_any_more_does_not_wait(tmp_path: Path) -> None:
    """As the coroutines of a loop that is gone: it raised RuntimeError, that it ignored its end. In a process of its own,
    since nothing is left that could give back what it has taken."""
    program = (
        "import asyncio, sys; from pathlib import Path; from tests.test_cache import LAYOUT, configured\n"
        "from tiercache import TierCache\n"
        "async def main():\n"
        "    starting = TierCache(configured(Path(sys.argv[1])), LAYOUT).start()\n"
        "    waits_for = starting.send(None)\n"
        "    while not Path(sys.argv[1], 'tiercache-chunks', 'tiercache.json').exists():\n"
        "        if waits_for.done():\n"
        "            waits_for = starting.send(None)\n"
        "        await asyncio.sleep(0)\n"
        "    starting.close()\n"
        "asyncio.run(main())\n"
    )
    ended = run(program, tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("way", ["open", "start"])
def test_program_that_does_not_close_its_cache_leaves_no_shared_memory(tmp_path: Path, arena_file: Path, way: str) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from tests.test_cache import LAYOUT, configured, key, payload\n"
        "from tiercache import TierCache\n"
        "async def main():\n"
        "    config = configured(Path(sys.argv[1]), shm_name=sys.argv[2])\n"
        "    if sys.argv[3] == 'open': cache = await (manager := TierCache.open(config, LAYOUT)).__aenter__()\n"
        "    else: cache = TierCache(config, LAYOUT); await cache.start()\n"
        "    for number in range(32): assert await cache.put(key(number), payload(number))\n"
        "asyncio.run(main())"
    )
    ended = run(program, tmp_path, arena_file.name.removeprefix("tiercache."), way)
    assert ended.returncode == 0 and not arena_file.exists()
    assert "abandoned" not in ended.stderr, "nothing is"
    if way == "start":  # the other one is closed with the loop's generators
        assert "the cache was not closed" in ended.stderr


async def test_close_with_a_read_at_any_step_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with TierCache.open(configured(tmp_path), LAYOUT) as cache:
        for number in range(8):
            assert await cache.put(key(number), payload(number))
    for steps in range(16):
        async with TierCache.open(configured(tmp_path), LAYOUT) as cache:
            reading = asyncio.create_task(cache.warm([key(number) for number in range(8)]))
            cache.prefetch([key(number) for number in range(8)])
            for _ in range(steps):
                await asyncio.sleep(0)
        await reading
        assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING], steps


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """What nobody uses any more is to be given back, not to be found later."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_start_that_comes_to_nothing_has_given_its_memory_back_when_it_ends(
    tmp_path: Path, arena_file: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = asyncio.Event()

    async def opens(tier: DiskTier) -> None:
        arrived.set()
        if end == "failed":
            raise OSError("no such device")
        await asyncio.Event().wait()

    monkeypatch.setattr(DiskTier, "open", opens)
    with without_collector():
        starting = asyncio.create_task(started(tmp_path, arena_file))
        await arrived.wait()
        if end == "cancelled":
            starting.cancel()
        with pytest.raises((asyncio.CancelledError, ConfigError)):
            await starting
        assert not arena_file.exists()
        assert not mapped(arena_file), "memory that waits for the garbage collector"


async def test_cancelled_start_ends_when_its_arena_is_given_back(arena_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touching, go_on = threading.Event(), threading.Event()

    def populate(part: np.ndarray) -> bool:
        touching.set()
        return go_on.wait(10.0)

    with monkeypatch.context() as patched, without_collector():
        patched.setattr("tiercache.memory.arena._populate", populate)
        starting = asyncio.create_task(started(None, arena_file))
        assert await asyncio.to_thread(touching.wait, 10.0)
        for _ in range(3):
            starting.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not starting.done(), "its arena still has the name"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not arena_file.exists()
        assert not mapped(arena_file)
    again = await started(None, arena_file)
    await again.close()


async def test_tier_that_fails_to_close_is_logged_and_everything_else_is_closed(
    tmp_path: Path, arena_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = DiskTier.close

    async def fails(tier: DiskTier) -> None:
        await close(tier)
        raise OSError("the device is gone")

    monkeypatch.setattr(DiskTier, "close", fails)
    cache = await started(tmp_path, arena_file)
    assert await cache.put(key(1), payload(1))
    assert (await cache.close()).complete
    assert "disk: closing failed" in caplog.text
    assert not mapped(arena_file)


async def test_second_close_brings_the_deadline_forward_while_a_tier_closes(
    tmp_path: Path, arena_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close, closing, go_on, closed = DiskTier.close, asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hangs(tier: DiskTier) -> None:
        closing.set()
        await go_on.wait()
        await close(tier)
        closed.set()

    monkeypatch.setattr(DiskTier, "close", hangs)
    cache = await started(tmp_path, arena_file)
    async with asyncio.timeout(60.0):
        first = asyncio.create_task(cache.close(600.0))
        await closing.wait()
        assert await cache.close(0.0) is await first
        assert "disk: does not close in time, and is abandoned" in caplog.text
        go_on.set()
        await closed.wait()


async def test_tier_that_opens_too_late_is_closed(tmp_path: Path, arena_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, closed = asyncio.Event(), asyncio.Event()

    async def opens(tier: DiskTier) -> None:
        while not go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go_on.wait()

    async def closes(tier: DiskTier) -> None:
        closed.set()

    monkeypatch.setattr(DiskTier, "open", opens)
    monkeypatch.setattr(DiskTier, "close", closes)
    monkeypatch.setattr(DiskTier, "open_s", 0.1)
    monkeypatch.setattr("tiercache.lifecycle._CALL_OFF_S", 0.1)
    with pytest.raises(ConfigError, match="did not open"):
        await started(tmp_path, arena_file)
    go_on.set()
    async with asyncio.timeout(60.0):
        await closed.wait()
