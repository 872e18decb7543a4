"""The scheduler's questions to the workers' caches: in one process, over sockets, and when nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import pytest

from tests.memory.test_memory import no_thread_to_be_had
from tests.vllm.halves import NAMES as ALL_NAMES
from tests.vllm.halves import Cached
from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.control.served import ServedCache
from tiercache.core.keys import keys_from_hashes
from tiercache.core.layout import Layout
from tiercache.integrations.vllm import lookup
from tiercache.integrations.vllm.lookup import Lookup, LookupClient, LookupServer, socket_path
from tiercache.integrations.vllm.planning import BlockGeometry, KvGroup, Match, Sibling, held_names, names_of
from tiercache.scheduler.reads import Hit
from tiercache.testing import JumpingClockLoop

GEOMETRY = BlockGeometry(block_tokens=16, blocks_per_chunk=4, save_tails=True)
NAMES = ALL_NAMES[:11]


@pytest.fixture
def engine(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A name that no other test uses, with a directory for sockets of its own."""
    monkeypatch.setattr(lookup.tempfile, "gettempdir", lambda: str(short_path))
    yield uuid.uuid4().hex
    assert not list(short_path.glob("*/*.sock")), "a socket was left behind"


class Worker(Cached):
    """A cache with a lookup server, holding the first `blocks` blocks of NAMES."""

    def __init__(
        self, engine: str, rank: int, blocks: int, size: int = 64, geometry: BlockGeometry = GEOMETRY, **settings: Any
    ) -> None:
        """`size`: bytes of a token."""
        layout = Layout("m", geometry.chunk_tokens, size, block_tokens=16, rank=rank, world_size=2)
        self.thread = CacheThread(Config(max_local_cpu_size=2 / 1024, **settings), layout)
        try:
            self.puts(*held_names(NAMES, blocks, geometry))
            self.server = LookupServer(engine, rank, self.thread, geometry)
        except BaseException:
            self.thread.close(1.0)
            raise

    def held(self) -> int:
        """Chunks that are held for requests, after all that was asked before."""
        return int(self.on_loop(lambda: len(self.server.claims.leases)))

    def finds(self, names: Sequence[bytes], claim: str = "r") -> Match:
        """Return the answer to a question for which no socket is used."""
        match: Match = self.ask(self.server.find(names, claim))
        return match

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        self.thread.close(1.0)


@pytest.fixture
def client(engine: str, opened: Callable[..., Any]) -> Any:
    """Of two workers. It is closed after them."""
    return opened(LookupClient, engine, 2, GEOMETRY)


def begun(client: LookupClient, names: Sequence[bytes], claim: str = "") -> Lookup:
    """A lookup that is asked at once."""
    one = client.begin(names, claim or uuid.uuid4().hex)
    client.send()
    return one


def answer_of(one: Lookup) -> Match:
    match = one.wait(30.0)
    assert match is not None
    return match


def ask(engine: str, ranks: int) -> Match:
    with closing(LookupClient(engine, ranks, GEOMETRY)) as client:
        return answer_of(begun(client, NAMES))


GROUPS = BlockGeometry(16, 2, groups=(KvGroup(0, 16, window_tokens=40), KvGroup(1, 16)))
"""The first has a window."""


@contextlib.contextmanager
def listening(engine: str, ranks: int) -> Iterator[list[socket.socket]]:
    """Sockets in the place of workers, which never answer."""
    paths = [socket_path(engine, rank) for rank in range(ranks)]
    paths[0].parent.mkdir(mode=0o700)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in paths]
        for one, path in zip(sockets, paths, strict=True):
            one.bind(str(path))
            one.listen()
        yield sockets
    for path in paths:
        path.unlink()


@pytest.mark.parametrize("ranks", [1, 2], ids=["in this process", "over sockets"])
def test_a_request_counts_once_however_often_it_is_looked_up(engine: str, ranks: int) -> None:
    client = LookupClient(engine, ranks, GEOMETRY)
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(engine, rank, 8)) for rank in range(ranks)]
        for number, again in enumerate((False, True, True)):
            one = client.begin(NAMES, f"r#{number}", again=again)
            client.send()
            assert answer_of(one).blocks == 8
        client.close()
        for worker in workers:
            advice = worker.thread.cache.statistics().advice
            assert (advice.requests, advice.usage.asked_tokens) == (1, 2 * GEOMETRY.chunk_tokens)


def test_blocks_after_the_last_chunk_are_missed_if_tails_are_not_stored(engine: str) -> None:
    with Worker(engine, 0, 8, geometry=replace(GEOMETRY, save_tails=False)) as worker:
        for names in (NAMES, [*NAMES[:4], *ALL_NAMES[20:27]]):
            worker.finds(names)
        usage = worker.thread.cache.statistics().advice.usage
        assert (usage.found_tokens, usage.missed_tokens["partial_chunk"]) == (3 * 64, 3 * 16)


def test_several_workers_agree_on_a_hit_whose_windows_all_have(engine: str) -> None:
    """At four chunks one has all and the other a gap, at two the other and not the one, at one chunk both."""
    client = LookupClient(engine, 2, GROUPS)
    with Worker(engine, 0, 0, geometry=GROUPS) as first, Worker(engine, 1, 0, geometry=GROUPS) as second:
        for worker, gap in ((first, 2), (second, 1)):
            worker.puts(*names_of([(group, chunk) for group in range(2) for chunk in range(4)], NAMES, GROUPS))
            worker.forgets(*names_of([(0, gap)], NAMES, GROUPS))
        assert answer_of(begun(client, NAMES)).blocks == 2
        assert [worker.thread.cache.statistics().advice.requests for worker in (first, second)] == [1, 1]
    client.close()


@pytest.mark.parametrize("ranks", [1, 2], ids=["in this process", "over sockets"])
@pytest.mark.parametrize("blocks", [8, 7], ids=["chunk", "tail"])
def test_a_hit_goes_on_into_a_chunk_of_another_request(engine: str, ranks: int, blocks: int) -> None:
    stored, asked = NAMES[:blocks], [*NAMES[:6], *ALL_NAMES[20:22]]
    client = LookupClient(engine, ranks, GEOMETRY)
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(engine, rank, 0)) for rank in range(ranks)]
        for worker in workers:
            worker.finds(stored, "before")
            worker.puts(NAMES[3], stored[-1])
        match = answer_of(begun(client, asked, "r"))
        assert (match.blocks, match.tokens_by_tier, match.sibling) == (6, {"cpu": 96}, Sibling(stored[-1], blocks - 4))
        for worker in workers:
            assert set(worker.server.claims.leases) == set(worker.keys(NAMES[3], stored[-1]))
        workers[-1].forgets(stored[-1])
        match = answer_of(begun(client, asked))
        assert (match.blocks, match.sibling) == (4, None), "only what all have is used so"
    client.close()


def test_a_chunk_of_another_request_is_read_for_half_of_its_blocks(engine: str, tmp_path: Path) -> None:
    with Worker(engine, 0, 0, local_disk=(str(tmp_path),), max_local_disk_size=0.1) as worker:
        worker.finds(NAMES[:8], "before")
        worker.puts(NAMES[3], NAMES[7])
        worker.only_on_disk()
        for in_common, blocks in ((5, 4), (6, 6), (5, 5)):
            match = worker.finds([*NAMES[:in_common], *ALL_NAMES[20:22]])
            assert (match.blocks, sum(match.tokens_by_tier.values())) == (blocks, 16 * blocks)
            assert match.sibling == (None if blocks == 4 else Sibling(NAMES[7], 4))


@pytest.mark.parametrize("blocks", [0, 3, 4, 9, 11])
def test_full_chunks_then_the_longest_tail(engine: str, blocks: int) -> None:
    """In one process, where no socket is used."""
    with Worker(engine, 0, blocks):
        client = LookupClient(engine, 1, GEOMETRY)
        assert answer_of(begun(client, NAMES)) == Match(blocks, {"cpu": 16 * blocks}, held=blocks > 0)
        assert "tiercache-lookup" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("first", "second", "both"), [(11, 8, 8), (11, 4, 4), (6, 6, 6), (11, 6, 4), (11, 0, 0)])
def test_over_sockets_the_answer_is_what_all_workers_have(engine: str, first: int, second: int, both: int) -> None:
    """Of 11 blocks, blocks 4 to 8 are one chunk, which cannot give the two that a worker with 6 has as a tail."""
    with Worker(engine, 0, first), Worker(engine, 1, second):
        answer = ask(engine, 2)
        assert (answer.blocks, sum(answer.tokens_by_tier.values())) == (both, 16 * both)


@pytest.mark.parametrize("room", [3, 2])
def test_over_sockets_it_is_held_only_if_all_workers_hold_it(engine: str, client: LookupClient, room: int) -> None:
    """Two chunks and a tail, of which the second worker may hold so many: half of its 2 MiB."""
    with Worker(engine, 0, 11) as first, Worker(engine, 1, 11, size=8192 if room == 2 else 5440) as second:
        assert answer_of(begun(client, NAMES, "r")) == Match(11, {"cpu": 176}, held=room == 3)
        assert [first.held(), second.held()] == [3, 3 if room == 3 else 0]
        assert answer_of(begun(client, NAMES, "the same chunks")).held is (room == 3)
        for worker in (first, second):
            for claim in ("r", "the same chunks"):
                worker.server.release(claim)
            assert worker.held() == 0


def test_what_is_held_for_one_that_ended_unnoticed_is_let_go(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_LONGEST_S", 0.0)
    with Worker(engine, 0, 11) as worker:
        worker.finds(NAMES)
        worker.until(lambda: worker.held() == 0)


def test_over_sockets_what_is_let_go_while_it_is_looked_up_is_not_held(
    engine: str, client: LookupClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, ended, locate = threading.Event(), threading.Event(), lookup.locate

    async def hanging(*arguments: Any, **more: Any) -> Any:
        if looking.is_set():
            return await locate(*arguments, **more)
        looking.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with Worker(engine, 0, 11) as first, Worker(engine, 1, 11) as second:
        monkeypatch.setattr(lookup, "locate", hanging)
        late = begun(client, NAMES)
        assert looking.wait(10)
        client.release(late)
        assert answer_of(begun(client, NAMES, "r")).held, "sent after what was let go"
        assert ended.wait(10)
        assert [first.held(), second.held()] == [3, 3]
        for worker in (first, second):
            worker.server.release("r")
            assert worker.held() == 0


def test_a_lookup_under_way_when_its_worker_closes_is_a_miss(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(server: LookupServer, names: Sequence[bytes], claim: str, *, again: bool = False) -> Match:
        await asyncio.sleep(3600)
        return Match()

    monkeypatch.setattr(LookupServer, "find", find)
    with Worker(engine, 0, 11) as worker:
        late = begun(LookupClient(engine, 1, GEOMETRY), NAMES)
        worker.on_loop(lambda: None)
    assert answer_of(late) == Match(failed=True)


@pytest.mark.parametrize(("geometry", "questions"), [(GEOMETRY, 3), (GROUPS, 3)])
def test_all_questions_of_a_lookup_share_one_deadline(geometry: BlockGeometry, questions: int) -> None:
    """A tier that is asked for tails, or for windows with gaps, takes all of the time that it is given."""
    asked: list[float] = []

    class SlowCache:
        config, namespace = Config(lookup_timeout_ms=3000), b"n" * 8

        async def lookup_keys(self, keys: Sequence[bytes], *, deadline_s: float, counts: bool) -> Hit:
            asked.append(deadline_s)
            await asyncio.sleep(deadline_s)
            return Hit(len(keys) - 1, 0, {})

        def lookup_hot(self, keys: Sequence[bytes]) -> int:
            return 0

        async def lookup_each(self, keys: Sequence[bytes], *, deadline_s: float) -> list[bool]:
            asked.append(deadline_s)
            await asyncio.sleep(deadline_s)
            return [False] * len(keys)

    async def takes_s() -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await lookup.locate(cast(ServedCache, SlowCache()), NAMES, geometry)
        return loop.time() - began_s

    with asyncio.Runner(loop_factory=JumpingClockLoop) as runner:
        assert runner.run(takes_s()) == pytest.approx(3.0, abs=0.1)
    assert len(asked) == questions and asked[0] == 3.0


@pytest.mark.parametrize(
    ("blocks", "again", "waits"),
    [(8, False, False), (8, True, True), (9, True, True), (11, True, False), (5, False, False), (4, False, True)],
)
def test_no_tier_is_asked_for_a_tail_of_a_request_that_is_hot(
    engine: str, blocks: int, again: bool, waits: bool
) -> None:
    """Unless it is looked up again, as one is whose tokens were announced, and a longer tail may be there."""
    with Worker(engine, 0, blocks) as worker:
        asked: list[float] = []
        lookup_each = worker.thread.cache.lookup_each

        async def noted(keys: Sequence[Any], *, deadline_s: float) -> list[bool]:
            asked.append(deadline_s)
            return await lookup_each(keys, deadline_s=deadline_s)

        worker.thread.cache.lookup_each = noted  # type: ignore[method-assign, assignment]
        assert worker.ask(worker.server.find(NAMES, "r", again=again)).blocks == blocks
        assert [deadline_s > 0 for deadline_s in asked] == ([False, True] if waits else [False])


def test_a_tail_counts_once_if_another_tier_is_worth_asking_with_it() -> None:
    """Each tier is judged by the number of chunks that are asked of it, and here one more makes the disk worthwhile."""

    class Cache:
        config, namespace = Config(), b"n" * 8

        async def lookup_keys(self, keys: Sequence[bytes], *, deadline_s: float, counts: bool) -> Hit:
            disk = 2 if len(keys) == 2 and deadline_s == 0 else 0
            return Hit(1 if deadline_s else len(keys), 0, {"cpu": 0, "disk": disk, "fs": 1 - disk // 2})

        async def lookup_each(self, keys: Sequence[bytes], *, deadline_s: float) -> list[bool]:
            return [False, False, True]

        def lookup_hot(self, keys: Sequence[bytes]) -> int:
            return 0

    match, found = asyncio.run(lookup.locate(cast(ServedCache, Cache()), NAMES, GEOMETRY, counts=True))
    assert (match.blocks, len(found)) == (7, 2)
    assert match.tokens_by_tier == {"cpu": 0, "disk": 48, "fs": 64}


def test_a_lookup_is_a_miss_only_while_no_thread_can_start(engine: str, client: LookupClient) -> None:
    with Worker(engine, 0, 8), Worker(engine, 1, 8):
        with no_thread_to_be_had():
            assert answer_of(begun(client, NAMES)) == Match(failed=True)
        assert answer_of(begun(client, NAMES)).blocks == 8


@pytest.mark.parametrize("ranks", [1, 2], ids=["in this process", "over sockets"])
def test_a_lookup_that_fails_is_a_miss(engine: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("of the cache")

    monkeypatch.setattr(lookup, "locate", fails)
    with Worker(engine, 0, 8), Worker(engine, 1, 8):
        assert ask(engine, ranks) == Match(failed=True)


def test_without_workers_it_is_a_miss_until_they_come_back(engine: str, client: LookupClient) -> None:
    for blocks in (8, 4):
        assert answer_of(begun(client, NAMES)) == Match(failed=True)
        with Worker(engine, 0, blocks), Worker(engine, 1, blocks):
            answer_of(begun(client, NAMES))
            assert answer_of(begun(client, NAMES)).blocks == blocks


def test_a_lookup_that_was_given_up_is_forgotten_though_no_answer_comes(engine: str, client: LookupClient) -> None:
    """With the next that is sent there."""
    with listening(engine, 2):
        of_its_own = [os.urandom(32)]
        client.release(begun(client, of_its_own))
        client.send()
        until_s = time.monotonic() + 30
        while any(type(one) is Lookup and one.question.names == of_its_own for one in gc.get_objects()):
            assert time.monotonic() < until_s, "it is kept for an answer that nobody wants"
        client.close()


def test_a_stranger_does_no_harm(engine: str, client: LookupClient, caplog: pytest.LogCaptureFixture) -> None:
    """And closing is quiet."""
    with Worker(engine, 0, 4), Worker(engine, 1, 4):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(socket_path(engine, 0)))
            stranger.sendall(os.urandom(64))
        assert answer_of(begun(client, NAMES)).blocks == 4
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_sockets_are_for_this_user_only_and_a_directory_of_somebody_else_is_refused(engine: str) -> None:
    directory = socket_path(engine, 0).parent
    with Worker(engine, 0, 0):
        assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    with pytest.raises(Exception, match="expected a directory of this user with mode 0700"):
        Worker(engine, 0, 0)


@pytest.mark.parametrize("mode", [pytest.param(0o700, marks=pytest.mark.needs("root")), 0o755])
def test_worker_of_somebody_else_is_not_asked(engine: str, mode: int) -> None:
    directory = socket_path(engine, 0).parent
    with listening(engine, 1) as (worker,):
        worker.setblocking(False)
        directory.chmod(mode)
        if mode == 0o700:
            os.chown(directory, 65534, 65534)
        assert ask(engine, 2) == Match(failed=True)
        with pytest.raises(BlockingIOError):
            worker.accept()


def test_claims_hold_shared_memory_that_others_evict(engine: str, in_memory: Path) -> None:
    """With no hot cache but the shared one. A load copies from what is held, so that it cannot fail."""
    layout = Layout("m", chunk_tokens=64, bytes_per_token=64, block_tokens=16)
    values = {"shared_memory_path": str(in_memory / "kv"), "max_shared_memory_size": 0.01, "local_cpu": False}
    config = Config.load(environ={}, overrides={"max_local_cpu_size": 0.01, **values})
    with closing(CacheThread(config, layout)) as thread:
        cache = thread.cache
        keys = keys_from_hashes(cache.namespace, [NAMES[3], NAMES[7]])
        for number, key in enumerate(keys):
            assert thread.submit(cache.put(key, bytes([number]) * 4096)).result(10)
        assert thread.submit(cache.flush()).result(10).complete
        with closing(LookupServer(engine, 0, thread, GEOMETRY)) as server:
            match = thread.submit(server.find(NAMES[:8], "request")).result(10)
            assert match.blocks == 8 and match.held
            for key in keys:
                os.unlink(cache.tiers[0].path(key))  # type: ignore[attr-defined]
            into = [bytearray(4096) for _ in keys]
            assert thread.submit(cache.get_into(keys, into, held=server.claims.leases)).result(10) == 2
            assert [bytes(part) for part in into] == [bytes(4096), bytes([1]) * 4096]
            server.release("request")
        assert cache.tiers[0].statistics().unlinked_bytes in (0, 2 * 8192)
