"""CacheThread: a synchronous engine uses it, and where something goes wrong each call ends and what was put is written."""

import asyncio
import concurrent.futures
import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chunks import chunks_of
from tests.test_cache import CHUNK_BYTES, LAYOUT, configured, key, payload
from tiercache import CacheThread, ConfigError
from tiercache.errors import CacheClosed


@pytest.fixture(params=["uvloop", "asyncio"])
def either_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_thread_serves_a_synchronous_engine(tmp_path: Path) -> None:
    thread = CacheThread(configured(tmp_path), LAYOUT)
    assert thread.submit(thread.cache.put(key(1), payload(1))).result(10)
    into = np.zeros(CHUNK_BYTES, np.uint8)
    assert thread.submit(thread.cache.get_into([key(1)], [into])).result(10) == 1
    assert np.array_equal(into, payload(1))
    assert thread.close().complete
    assert thread.close().complete
    with pytest.raises(CacheClosed):
        thread.submit(thread.cache.put(key(2), payload(2)))


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300, -20.0, float("-inf")])
def test_close_takes_infinite_and_past_times(timeout_s: float) -> None:
    thread = CacheThread(configured(), LAYOUT)
    assert thread.close(timeout_s).complete


@pytest.mark.parametrize("timeout_s", [float("nan"), "5"])
def test_close_by_a_time_that_is_no_number_changes_nothing(timeout_s: Any) -> None:
    thread = CacheThread(configured(), LAYOUT)
    try:
        with pytest.raises((ValueError, TypeError)):
            thread.close(timeout_s)
        assert thread.submit(thread.cache.put(key(1), payload(1))).result(10)
    finally:
        assert thread.close().complete


def test_thread_raises_what_opening_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="local_disk"):
        CacheThread(configured(tmp_path / "file"), LAYOUT)


def test_loop_that_cannot_be_made_is_one_clear_error() -> None:
    config = configured()
    with no_more_descriptors(), pytest.raises(ConfigError, match="ulimit -n"):
        CacheThread(config, LAYOUT)


async def _exits() -> None:
    raise SystemExit(3)


async def _is_interrupted() -> None:
    raise KeyboardInterrupt


async def _stops_the_loop() -> None:
    asyncio.get_running_loop().stop()


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("end", [_exits, _is_interrupted, _stops_the_loop])
def test_cache_is_closed_whatever_ends_its_loop(tmp_path: Path, end: Callable[[], Coroutine[None, None, None]]) -> None:
    thread = CacheThread(configured(tmp_path), LAYOUT)

    async def put_and_end() -> None:
        await thread.cache.put_many([key(number) for number in range(8)], [payload(number) for number in range(8)])
        await end()

    future = thread.submit(put_and_end())
    concurrent.futures.wait([future], 10.0)
    assert thread.close(5.0).complete
    assert all([*chunks_of(tmp_path).glob(f"*/{key(number).hex()}")] for number in range(8))
    with pytest.raises(CacheClosed):
        thread.submit(put_and_end())


def test_cache_is_closed_where_somebody_cancels_the_task_that_waits_for_it() -> None:
    thread = CacheThread(configured(), LAYOUT)

    async def cancel_it() -> None:
        next(task for task in asyncio.all_tasks() if "_serve" in repr(task)).cancel()

    thread.submit(cancel_it()).result(10.0)
    assert thread.close(5.0).complete


def test_forked_process_is_told_at_once_that_it_has_no_cache() -> None:
    thread = CacheThread(configured(), LAYOUT)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        began_s = time.monotonic()
        for call in (lambda: thread.close(1.0), lambda: thread.submit(_exits())):
            try:
                call()
            except CacheClosed:
                os.write(writing, b"closed ")
        os.write(writing, b"soon" if time.monotonic() - began_s < 1.0 else b"late")
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"closed closed soon"
    os.waitpid(child, 0)
    assert thread.close().complete


def test_whatever_is_submitted_while_the_cache_closes_ends() -> None:
    ended: list[object] = []

    def submit_until_closed(thread: CacheThread, is_submitting: threading.Event) -> None:
        futures = []
        try:
            while True:
                futures.append(thread.submit(asyncio.sleep(0)))
                is_submitting.set()
                concurrent.futures.wait(futures[-2:-1], 10.0)
        except BaseException as error:
            ended.append(type(error))
        ended.append(not concurrent.futures.wait(futures, 10.0).not_done)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(_ROUNDS):
            thread, is_submitting = CacheThread(configured(), LAYOUT), threading.Event()
            threads = [threading.Thread(target=submit_until_closed, args=(thread, is_submitting)) for _ in range(3)]
            for one in threads:
                one.start()
            assert is_submitting.wait(10.0)
            thread.close()
            for one in threads:
                one.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert ended.count(CacheClosed) == ended.count(True) == 3 * _ROUNDS


_ROUNDS = 60
