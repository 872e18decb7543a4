"""What a worker says of the tiers of its rank, with a real cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.core.keys import keys_from_hashes
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.events import Change, Residency
from tiercache.integrations.vllm.planning import BlockGeometry

NAMES = [bytes([number]) * 32 for number in range(8)]
CHUNK_BYTES = 4096


class Worker:
    def __init__(self, layout: Layout, **settings: Any) -> None:
        self.thread = CacheThread(Config(**({"max_local_cpu_size": 0.01} | settings)), layout)
        self.residency = Residency(self.thread, layout, BlockGeometry(1, 1))

    def stores(self, *names: bytes) -> None:
        cache = self.thread.cache
        for key in keys_from_hashes(cache.namespace, names):
            assert self.thread.submit(cache.put(key, b"x" * CHUNK_BYTES)).result(10)
        self.thread.submit(cache.flush()).result(60)

    def does(self, what: Callable[[], Any]) -> Any:
        """On the loop, after all that was asked of it before."""
        ended = threading.Event()
        answer: list[Any] = []
        self.thread.loop.call_soon_threadsafe(lambda: (answer.append(what()), ended.set()))
        assert ended.wait(30)
        return answer[0]

    def says(self) -> set[tuple[bytes, str, bool]]:
        self.does(lambda: None)
        report = self.residency.take(is_storing=False)
        return {change[:3] for change in report.changes} if report is not None else set()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(layout: Layout | None = None, **settings: Any) -> Worker:
        plain = Layout("m", chunk_tokens=16, bytes_per_token=CHUNK_BYTES // 16)
        disk = {"local_disk": str(tmp_path), "max_local_disk_size": 0.1}
        workers.append(Worker(layout or plain, **(disk | settings)))
        return workers[-1]

    yield make
    for worker in workers:
        worker.thread.close(5.0)


def watched(*names: bytes) -> dict[bytes, bool]:
    return dict.fromkeys(names, True)


def test_what_is_watched_is_told_of_where_it_comes_and_goes(made: Callable[..., Worker]) -> None:
    worker = made()
    worker.residency.watch(watched(NAMES[0], NAMES[1]))
    worker.stores(*NAMES[:3])
    assert worker.says() == {(name, tier, True) for name in NAMES[:2] for tier in ("cpu", "disk")}
    assert worker.says() == set()
    worker.does(worker.thread.cache.clear_hot)
    assert worker.says() == {(name, "cpu", False) for name in NAMES[:2]}


def test_what_is_there_already_is_told_when_it_is_watched(made: Callable[..., Worker]) -> None:
    worker = made()
    worker.stores(*NAMES[:2])
    assert worker.says() == set()
    worker.residency.watch(watched(NAMES[1]))
    assert worker.says() == {(NAMES[1], "cpu", True), (NAMES[1], "disk", True)}


def test_only_the_last_of_several_changes_is_told(made: Callable[..., Worker]) -> None:
    worker = made()
    worker.residency.watch(watched(NAMES[0]))
    worker.stores(NAMES[0])
    worker.does(worker.thread.cache.clear_hot)
    assert worker.says() == {(NAMES[0], "cpu", False), (NAMES[0], "disk", True)}


def test_what_is_not_watched_any_more_is_not_told(made: Callable[..., Worker]) -> None:
    worker = made()
    worker.residency.watch(watched(NAMES[0]))
    worker.stores(NAMES[0])
    worker.says()
    worker.residency.watch({NAMES[0]: False})
    worker.does(worker.thread.cache.clear_hot)
    assert worker.says() == set()


def test_what_is_watched_anew_is_told_anew(made: Callable[..., Worker]) -> None:
    """The scheduler's half dropped it and knows nothing of it any more."""
    worker = made()
    worker.residency.watch(watched(NAMES[0]))
    worker.stores(NAMES[0])
    first = worker.says()
    worker.residency.watch(watched(NAMES[0]))
    assert worker.says() == first


def test_a_hot_cache_that_keeps_nothing_is_no_place_for_chunks(made: Callable[..., Worker]) -> None:
    worker = made(local_cpu=False)
    worker.residency.watch(watched(NAMES[0]))
    worker.stores(NAMES[0])
    assert worker.says() == {(NAMES[0], "disk", True)}


def test_a_change_says_whose_part_it_is(made: Callable[..., Worker]) -> None:
    layout = Layout("m", chunk_tokens=16, bytes_per_token=CHUNK_BYTES // 16, rank=2, world_size=4, replicas=2)
    worker = made(layout)
    (name,) = [name for name in NAMES[:2] if layout.keeps(keys_from_hashes(layout.namespace(), [name])[0])][:1]
    worker.residency.watch(watched(name))
    worker.stores(name)
    worker.does(lambda: None)
    report = worker.residency.take(is_storing=False)
    assert report is not None and report.rank == 2
    assert set(report.changes) == {Change(name, "cpu", True, 2, 2, 4), Change(name, "disk", True, 2, 1, 2)}


def test_a_worker_says_when_more_may_follow_and_when_no_more(made: Callable[..., Worker]) -> None:
    worker = made()
    assert worker.residency.take(is_storing=False) is None
    report = worker.residency.take(is_storing=True)
    assert report is not None and report.is_busy and report.changes == []
    assert worker.residency.take(is_storing=True) is None
    report = worker.residency.take(is_storing=False)
    assert report is not None and not report.is_busy
    assert worker.residency.take(is_storing=False) is None


def test_nobody_listens_where_nobody_wants_to_know(tmp_path: Path) -> None:
    layout = Layout("m", chunk_tokens=16, bytes_per_token=CHUNK_BYTES // 16)
    thread = CacheThread(Config(max_local_cpu_size=0.01, local_disk=str(tmp_path), max_local_disk_size=0.1), layout)
    try:
        assert thread.cache.cpu._on_change is None
        (disk,) = thread.cache.tiers
        (directory,) = disk.directories.all  # type: ignore[attr-defined]
        assert directory.index.on_change is None
        assert not disk.lookup.refreshers  # type: ignore[attr-defined]
    finally:
        thread.close(5.0)
