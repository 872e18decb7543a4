"""What a worker says of the tiers of its rank, with a real cache; and what routers are told: the fewest events that keep a
router's picture of the tiers right."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockStored

from tests.vllm.halves import NAMES, Cached
from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.integrations.vllm import events
from tiercache.integrations.vllm.events import Changes, KnownChunk, KvEvents, Residency
from tiercache.integrations.vllm.planning import BlockGeometry

# Of a worker


class Worker(Cached):
    def __init__(self, **settings: Any) -> None:
        layout = Layout("m", chunk_tokens=16, bytes_per_token=256)
        self.thread = CacheThread(Config(max_local_cpu_size=0.01, **settings), layout)
        self.residency = Residency(self.thread, BlockGeometry(1, 1))

    def close(self) -> None:
        self.thread.close(5.0)

    def watches(self, *names: bytes) -> None:
        self.residency.watch(dict.fromkeys(names, True))

    def stores(self, *names: bytes) -> None:
        self.puts(*names)
        self.ask(self.thread.cache.flush())

    def says(self) -> set[tuple[bytes, str, bool]]:
        self.on_loop(lambda: None)
        return {(*place, there) for place, there in (self.residency.take() or {}).items()}


@pytest.fixture
def made(opened: Callable[..., Any], tmp_path: Path) -> Callable[..., Worker]:
    return partial(opened, Worker, local_disk=str(tmp_path), max_local_disk_size=0.1)


def test_what_is_there_already_is_told_whenever_it_is_watched_anew(made: Callable[..., Worker]) -> None:
    """The scheduler's half dropped it and knows nothing of it any more."""
    worker = made()
    worker.stores(*NAMES[:2])
    assert worker.says() == set()
    for _ in range(2):
        worker.watches(NAMES[1])
        assert worker.says() == {(NAMES[1], "CPU", True), (NAMES[1], "STORAGE", True)}
    worker.residency.watch({NAMES[1]: False})
    worker.only_on_disk()
    assert worker.says() == set()


def test_a_hot_cache_that_keeps_nothing_is_no_place_for_chunks(made: Callable[..., Worker]) -> None:
    worker = made(local_cpu=False)
    worker.watches(NAMES[0])
    worker.stores(NAMES[0])
    assert worker.says() == {(NAMES[0], "STORAGE", True)}


def test_a_medium_has_a_chunk_while_one_of_its_tiers_has(made: Callable[..., Worker], in_memory: Path) -> None:
    """And only the last of several changes is told."""
    worker = made(shared_memory_path=str(in_memory / "kv"), max_shared_memory_size=0.01)
    worker.watches(NAMES[0])
    worker.stores(NAMES[0])
    worker.only_on_disk()
    assert worker.says() == {(NAMES[0], "CPU", False), (NAMES[0], "STORAGE", True)}
    for tier, told in zip(worker.thread.cache.tiers, (set(), {(NAMES[0], "STORAGE", False)}), strict=True):
        assert worker.ask(tier.remove(*worker.keys(NAMES[0])))
        assert worker.says() == told


def test_chunks_of_a_detached_tier_are_gone_until_it_is_attached(made: Callable[..., Worker]) -> None:
    worker = made()
    worker.watches(*NAMES[:2])
    worker.stores(*NAMES[:2])
    worker.only_on_disk()
    worker.says()
    cache = worker.thread.cache
    for change, there in ((cache.detach, False), (cache.attach, True)):
        worker.ask(change("disk"))
        worker.ask(cache.tiers[0].scanned())
        said = worker.says() | worker.says()  # the first step after the change makes the worker look
        assert said == {(name, "STORAGE", there) for name in NAMES[:2]}


# To routers

BLOCK_TOKENS = 4


def block(*path: int) -> bytes:
    """The hash of the block at the end of a path of contents: it stands for all before it."""
    return bytes([len(path), *path]).ljust(32, b".")


def chunk(path: tuple[int, ...], blocks: int) -> KnownChunk:
    """The last `blocks` blocks of a path."""
    first = len(path) - blocks
    hashes = tuple(block(*path[:end]) for end in range(first + 1, len(path) + 1))
    tokens = array("I", [content for content in path[first:] for _ in range(BLOCK_TOKENS)])
    return KnownChunk(hashes, block(*path[:first]) if first else None, tokens, BLOCK_TOKENS)


def change(paths: Sequence[tuple[int, ...]], medium: str, there: bool) -> Changes:
    return {(block(*path), medium): there for path in paths}


FIRST, SECOND, THIRD = (1, 2), (1, 2, 3, 4), (9, 9)


@pytest.fixture(scope="module")
def few() -> Iterator[None]:
    """No more than three chunks are known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "MOST_CHUNKS", 3)
        yield


def knowing(*paths: tuple[int, ...]) -> KvEvents:
    announced = KvEvents(BlockGeometry(BLOCK_TOKENS, 1), BLOCK_TOKENS)
    for path in paths:
        announced.know(block(*path), chunk(path, 2))
    return announced


def test_workers_watch_what_is_known_and_no_more(few: None) -> None:
    announced = knowing(FIRST, SECOND, THIRD)
    assert announced.take_watching() == {block(*path): True for path in (FIRST, SECOND, THIRD)}
    assert announced.knows(block(*FIRST)) and announced.take_watching() == {}
    announced.know(block(8, 8), chunk((8, 8), 2))
    assert announced.take_watching() == {block(8, 8): True, block(*SECOND): False}


PATHS = [(1,), (1, 2), (1, 3), (1, 2, 3), (1, 2, 3, 4), (2, 1)]
PATH_OF = {block(*path): path for path in PATHS}
LENGTHS = {path: 1 + (len(path) + 1) % 2 for path in PATHS}
Step = tuple[tuple[int, ...], str, bool, bool]
STEPS = st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(["CPU", "STORAGE"]), st.booleans(), st.booleans()))


@settings(deadline=None, max_examples=300)
@given(STEPS)
@pytest.mark.usefixtures("few")
def test_a_router_that_follows_the_events_knows_what_is_there(steps: list[Step]) -> None:
    """Each block is stored once before it is removed once, also for a router that counts; and the picture is exact: of
    chunks that were described and did not fall over the bound."""
    announced = KvEvents(BlockGeometry(BLOCK_TOKENS, 1), BLOCK_TOKENS)
    router: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
    there: dict[tuple[int, ...], set[str]] = {}
    for path, changed, is_there, known in steps:
        if known and not announced.knows(block(*path)):
            announced.know(block(*path), chunk(path, LENGTHS[path]))
            there[path] = set()
        announced.changed(change([path], changed, is_there))
        for name, is_watched in announced.take_watching().items():
            if not is_watched:
                del there[PATH_OF[name]]
        if path in there:
            (there[path].add if is_there else there[path].discard)(changed)
        for event in announced.take():
            hashes = set(event.block_hashes)
            if isinstance(event, BlockStored):
                assert hashes and not hashes & router[event.medium]
                router[event.medium] |= hashes
            else:
                assert hashes <= router[event.medium] and len(hashes) == len(event.block_hashes)
                router[event.medium] -= hashes
        for medium in router:
            expected = {value for one in there if medium in there[one] for value in chunk(one, LENGTHS[one]).hashes}
            assert router[medium] == expected
    assert len(there) <= 3
