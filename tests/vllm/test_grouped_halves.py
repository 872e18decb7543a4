"""Both halves with two groups of layers, one of which has a window, against a real cache."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiercache.config import Config
from tiercache.control.messages import Prefix
from tiercache.core.keys import keys_from_hashes
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.blocks import make_mover
from tiercache.integrations.vllm.hints import RequestBegan
from tiercache.integrations.vllm.lookup import AnnouncedPrompts, LookupClient
from tiercache.integrations.vllm.metadata import StepReport, StepWork
from tiercache.integrations.vllm.names import BlockNames
from tiercache.integrations.vllm.planning import BlockGeometry, KvGroup, all_names, names_of
from tiercache.integrations.vllm.scheduler import SchedulerSide
from tiercache.integrations.vllm.worker import WorkerSide

BLOCKS, HEADS, TOKENS, HEAD_SIZE = 64, 2, 16, 8
SPEC = SimpleNamespace(
    block_size=TOKENS,
    num_kv_heads=HEADS,
    num_heads=HEADS,
    head_size=HEAD_SIZE,
    head_size_v=HEAD_SIZE,
    state_content_size_bytes=2 * HEAD_SIZE * 2,
)
WINDOW = KvGroup(0, TOKENS, ("w0", "w1"), 40, SPEC)
FULL = KvGroup(1, TOKENS, ("f0", "f1"), None, SPEC)
GEOMETRY = BlockGeometry(TOKENS, 2, groups=(WINDOW, FULL))
NAMES = [bytes([number]) * 32 for number in range(32)]


class Engine:
    """vLLM's side of the conversation, and its KV: the layers of both groups lie in the same memory, as vLLM has them."""

    def __init__(self, **settings: Any) -> None:
        config = Config(**({"max_local_cpu_size": 0.01, "close_timeout_s": 5.0} | settings))
        self.kv = torch.randint(-100, 100, (2, BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE)).to(torch.bfloat16)
        tensors = {name: self.kv[number] for group in (WINDOW, FULL) for number, name in enumerate(group.layers)}
        name = uuid.uuid4().hex
        mover = make_mover(config, tensors, BLOCKS, GEOMETRY.groups)
        layout = Layout("m", chunk_tokens=32, bytes_per_token=mover.kvs[0].bytes_per_token, block_tokens=TOKENS)
        self.worker = WorkerSide(config, GEOMETRY, layout, mover, name, BlockNames("sha256", TOKENS))
        self.client = LookupClient(name, 1, GEOMETRY, 5.0)
        self.side = SchedulerSide(config, GEOMETRY, BlockNames("sha256", TOKENS), self.client, 1)
        self.tables: dict[str, tuple[list[int], list[int]]] = {}

    def close(self) -> None:
        self.client.close()
        self.worker.close()

    @property
    def claims(self) -> int:
        """Chunks that are held for requests, when the cache's thread has done what it was told."""
        claims = self.worker._lookups.claims
        assert claims is not None

        async def held() -> int:
            return claims.held

        return self.worker.thread.submit(held()).result(10)

    def leases(self) -> int:
        async def held() -> int:
            return sum(self.worker.thread.cache.cpu.budget.held)

        return self.worker.thread.submit(held()).result(10)

    def content(self, *blocks: int) -> Any:
        return self.kv[:, torch.tensor(blocks)].clone()

    def arrives(self, tokens: int, name: str = "r", **more: Any) -> Any:
        request = SimpleNamespace(
            request_id=name,
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            block_hashes=NAMES[: tokens // TOKENS],
            cache_salt=None,
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            priority=0,
            skip_reading_prefix_cache=False,
        )
        vars(request).update(more)
        self.side.on_new_request(request)
        return request

    def finds(self, request: Any, computed: int = 0) -> tuple[int, bool]:
        until_s = time.monotonic() + 5
        while (answer := self.side.matched_tokens(request, computed))[0] is None:
            assert time.monotonic() < until_s
        tokens, later = answer
        assert tokens is not None
        return tokens, later

    def admits(self, request: Any, window: list[int], full: list[int], computed: int = 0) -> tuple[int, bool]:
        tokens, later = self.finds(request, computed)
        self.tables[request.request_id] = window, full
        self.side.after_allocation(request, (window, full), tokens)
        request.num_computed_tokens = computed + tokens
        return tokens, later

    def steps(self, *scheduled: tuple[Any, int], new_blocks: tuple[list[int], ...] | None = None) -> StepWork:
        """One step in both halves: planned, begun, computed, and what the worker has to say taken back."""
        output: Any = SimpleNamespace(
            preempted_req_ids=set(),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request, _ in scheduled],
                num_computed_tokens=[request.num_computed_tokens for request, _ in scheduled],
                new_block_ids=[new_blocks for _ in scheduled],
                resumed_req_ids=set(),
            ),
            kv_cache_block_copies=None,
            num_scheduled_tokens={request.request_id: tokens for request, tokens in scheduled},
            kv_connector_block_state=SimpleNamespace(get_block_ids=self.tables.__getitem__),
        )
        work = self.side.step_work(output)
        self.worker.before_blocks_are_given_away(work.preempted, work.given_away)
        self.worker.load(work)
        for request, tokens in scheduled:
            request.num_computed_tokens += tokens
        self.worker.save(work)
        return work

    def until(self, happened: Callable[[], Any]) -> Any:
        for _ in range(1000):
            if found := happened():
                return found
            settled = threading.Event()
            self.worker.thread.loop.call_soon_threadsafe(lambda: self.worker.thread.loop.call_later(0.005, settled.set))
            settled.wait(10)
        raise AssertionError("it never happened")

    def receives(self) -> set[str]:
        """Waits for an asynchronous load; returns which have failed."""
        received = self.until(lambda: self.worker.finished()[1])
        failed = self.worker.take_failed()
        self.side.loads_failed((), failed)
        self.side.received(received)
        return failed

    def stored(self) -> set[tuple[int, int]]:
        """(group, chunk) of what the cache has, when all that is under way is stored."""
        self.until(lambda: not self.worker._storing)
        cache = self.worker.thread.cache
        found = set()
        for chunk in range(8):
            for group in range(2):
                keys = keys_from_hashes(cache.namespace, names_of([(group, chunk)], NAMES, GEOMETRY))
                if self.worker.thread.submit(cache.lookup_keys(keys)).result(10).chunks:
                    found.add((group, chunk))
        return found

    def forgets(self, *chunks: tuple[int, int]) -> None:
        cache = self.worker.thread.cache
        keys = keys_from_hashes(cache.namespace, names_of(list(chunks), NAMES, GEOMETRY))
        self.worker.thread.submit(cache.forget(keys)).result(10)

    def computes_and_saves(self, tokens: int = 132) -> Any:
        """A request of which all blocks are there: windows from block 1 on, full attention from 20 on."""
        request = self.arrives(tokens, "first")
        self.admits(request, list(range(1, 10)), list(range(20, 29)))
        self.steps((request, tokens))
        expected = self.content(*range(1, 9)), self.content(*range(20, 28))
        assert len(self.stored()) == 2 * (tokens // 32)
        self.ends(request)
        return expected

    def ends(self, request: Any) -> None:
        while True:
            self.worker.finished()
            if (progress := self.worker.take_progress()) is not None:
                self.side.progress(progress)
            if not self.side.finished(request, self.tables.get(request.request_id, ((), ())))[0]:
                return
            self.steps()
            assert self.until(lambda: self.worker.finished()[0])


@pytest.fixture
def made() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engines.append(Engine(**settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(params=["auto", "cpu"])
def engine(request: pytest.FixtureRequest, made: Callable[..., Engine]) -> Engine:
    return made(device=request.param)


def test_a_hit_fills_the_blocks_that_the_window_keeps_and_all_others(engine: Engine) -> None:
    window, full = engine.computes_and_saves()
    request = engine.arrives(132)
    tables = [0] * 5 + [30, 31, 32, 33], list(range(40, 49))
    before = engine.content(0)
    assert engine.admits(request, *tables) == (128, True)
    engine.steps()
    assert engine.receives() == set()
    assert torch.equal(engine.content(30, 31, 32), window[:, 5:])
    assert torch.equal(engine.content(*range(40, 48)), full)
    assert torch.equal(engine.content(0), before), "the null block belongs to nobody"
    assert engine.until(lambda: engine.claims == 0)


def test_only_what_the_engine_lacks_is_loaded(engine: Engine) -> None:
    window, full = engine.computes_and_saves()
    request = engine.arrives(132)
    assert engine.admits(request, [0] * 5 + [6, 31, 32, 33], [*range(20, 26), 46, 47, 48], computed=96) == (32, True)
    (load,) = engine.steps().loads
    assert [(one.group, one.blocks) for one in load.transfers] == [(0, (31, 32)), (1, (46, 47))]
    assert engine.receives() == set()
    assert torch.equal(engine.content(31, 32), window[:, 6:]) and torch.equal(engine.content(46, 47), full[:, 6:])


def test_a_gap_in_a_window_makes_the_hit_shorter(engine: Engine) -> None:
    engine.computes_and_saves()
    engine.forgets((0, 3))
    assert engine.finds(engine.arrives(132)) == (96, True)
    engine.forgets((0, 1))
    assert engine.finds(engine.arrives(132, "other")) == (32, True), "a hit of 64 or 96 tokens needs the second chunk"


def test_the_last_token_is_left_to_compute_and_windows_are_there_for_the_rest(engine: Engine) -> None:
    engine.computes_and_saves()
    assert engine.finds(engine.arrives(128)) == (96, True)


def test_of_what_another_engine_stores_no_more_is_waited_for_than_a_hit_can_have(engine: Engine) -> None:
    """Four whole chunks, of which the last has the token that is computed in any case."""
    engine.computes_and_saves(128)
    request = engine.arrives(128, kv_transfer_params={"tiercache.expect_tokens": 128})
    assert engine.finds(request) == (96, True)
    assert time.monotonic() - engine.side._requests["r"].arrived_s < 60


def test_a_load_that_fails_begins_again_and_is_not_tried_again(engine: Engine) -> None:
    engine.computes_and_saves()
    request = engine.arrives(132)
    tables = [0] * 5 + [30, 31, 32, 33], list(range(40, 49))
    assert engine.admits(request, *tables) == (128, True)
    engine.forgets((0, 3))
    engine.steps()
    assert engine.receives() == {"r"}
    assert engine.worker.take_bad_blocks() == set(), "vLLM takes no bad blocks where there are several groups"
    assert engine.until(lambda: engine.claims == 0)
    request.num_computed_tokens = 0
    assert engine.admits(request, list(range(1, 10)), list(range(20, 29))) == (0, False)
    assert len(engine.steps((request, 132)).saves[0].transfers) == 8, "what was computed is stored anew"


def test_a_load_that_cannot_be_planned_fails(engine: Engine) -> None:
    engine.computes_and_saves()
    request = engine.arrives(132)
    assert engine.admits(request, [0] * 9, list(range(40, 49))) == (128, True)
    (load,) = engine.steps().loads
    assert load.impossible and not load.transfers
    assert engine.receives() == {"r"}


def test_windows_that_were_freed_are_not_stored_and_the_rest_is(engine: Engine) -> None:
    request = engine.arrives(132)
    engine.admits(request, [0, 0, 0, *range(4, 10)], list(range(20, 29)))
    engine.steps((request, 132))
    assert engine.stored() == {(0, 2), (0, 3), *((1, chunk) for chunk in range(4))}


def test_a_block_that_is_given_away_is_read_before(made: Callable[..., Engine]) -> None:
    engine = made()
    stopped, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        stopped.set()
        go_on.wait(10)

    request, other = engine.arrives(132), engine.arrives(16, "other", block_hashes=[b"o" * 32])
    engine.admits(request, list(range(1, 10)), list(range(20, 29)))
    engine.worker.thread.loop.call_soon_threadsafe(stop)
    stopped.wait(10)
    engine.steps((request, 132))
    expected = engine.content(*range(1, 9))
    timer = threading.Timer(0.05, go_on.set)
    timer.start()
    engine.tables["other"] = [3], [50]
    work = engine.steps((other, 1), new_blocks=([3], [50]))
    assert work.given_away == {3, 50} and go_on.is_set(), "the step waits for the copy of what it gives away"
    engine.kv[:, torch.tensor([3])] = 0
    engine.stored()
    engine.ends(request)
    again = engine.arrives(132, "again")
    assert engine.admits(again, [0] * 5 + [30, 31, 32, 33], list(range(40, 49))) == (128, True)
    engine.steps()
    assert engine.receives() == set()
    assert torch.equal(engine.content(30, 31, 32), expected[:, 5:])


def test_a_step_that_gives_away_other_blocks_does_not_wait(made: Callable[..., Engine]) -> None:
    engine = made()
    stopped, go_on = threading.Event(), threading.Event()
    request = engine.arrives(132)
    engine.admits(request, list(range(1, 10)), list(range(20, 29)))
    engine.worker.thread.loop.call_soon_threadsafe(lambda: (stopped.set(), go_on.wait(10)))
    stopped.wait(10)
    engine.steps((request, 132))
    engine.steps((request, 0), new_blocks=([60], [61]))
    assert not go_on.is_set()
    go_on.set()


def test_blocks_that_a_new_request_shares_are_not_waited_for(made: Callable[..., Engine]) -> None:
    """They are read, and by the engine as well."""
    engine = made()
    output: Any = SimpleNamespace(
        preempted_req_ids=set(),
        scheduled_new_reqs=[
            SimpleNamespace(req_id="new", num_computed_tokens=64, block_ids=([0, 2, 3, 4, 30], [20, 21, 22, 23, 40]))
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["resumed", "running"],
            num_computed_tokens=[32, 96],
            new_block_ids=[([5, 6, 31], [24, 25, 41]), ([32], [42])],
            resumed_req_ids={"resumed"},
        ),
        kv_cache_block_copies=[SimpleNamespace(src_block_id=1, dst_block_id=50)],
        num_scheduled_tokens={"new": 1, "resumed": 1, "running": 1},
        kv_connector_block_state=None,
    )
    assert engine.side.step_work(output).given_away == {30, 40, 31, 41, 32, 42, 50}


def test_an_announced_prompt_is_the_chunks_of_all_groups(made: Callable[..., Engine]) -> None:
    engine = made()
    cache = engine.worker.thread.cache
    naming = AnnouncedPrompts(BlockNames("sha256", TOKENS), GEOMETRY)
    prefix = Prefix(tokens=list(range(132)))

    async def announced() -> tuple[list[bytes], list[bytes], list[bytes]]:
        names = await naming.names.of_tokens(prefix.tokens or (), "", None)
        stored = names_of([(group, chunk) for group in range(2) for chunk in range(2)], names, GEOMETRY)
        for key in keys_from_hashes(cache.namespace, stored):
            await cache.put(key, b"x" * 2048)
        return names, await naming.keys(cache, prefix), await naming.all_keys(cache, prefix)

    names, keys, all_keys = engine.worker.thread.submit(announced()).result(10)
    found = [(1, 0), (1, 1), (0, 1), (0, 0)]
    missing = [(1, 2), (1, 3), (0, 3), (0, 2)]
    expected = names_of([*found, *missing], names, GEOMETRY)
    assert keys == keys_from_hashes(cache.namespace, expected)
    assert set(all_keys) == set(keys) and len(all_keys) == 8


def test_what_is_promised_is_held_until_it_is_loaded(made: Callable[..., Engine], tmp_path: Path) -> None:
    engine = made(local_disk=str(tmp_path), max_local_disk_size=1.0)
    window, _ = engine.computes_and_saves()
    cache = engine.worker.thread.cache
    assert engine.worker.thread.submit(cache.flush(10)).result(20).complete
    engine.worker.thread.submit(_clear(cache)).result(10)
    request = engine.arrives(132)
    assert engine.finds(request) == (128, True)
    assert engine.claims == 6, "four chunks of the layers that see everything, and two of the window"
    assert engine.leases() == 6
    for path in tmp_path.glob("??/*"):
        path.unlink()
    tables = [0] * 5 + [30, 31, 32, 33], list(range(40, 49))
    assert engine.admits(request, *tables) == (128, True)
    engine.steps()
    assert engine.receives() == set()
    assert torch.equal(engine.content(30, 31, 32), window[:, 5:])
    assert engine.until(lambda: engine.claims == 0 and engine.leases() == 0)


async def _clear(cache: Any) -> int:
    return int(cache.clear_hot())


def test_a_damaged_chunk_is_not_promised(made: Callable[..., Engine], tmp_path: Path) -> None:
    engine = made(local_disk=str(tmp_path), max_local_disk_size=1.0)
    engine.computes_and_saves()
    cache = engine.worker.thread.cache
    assert engine.worker.thread.submit(cache.flush(10)).result(20).complete
    engine.worker.thread.submit(_clear(cache)).result(10)
    (key,) = keys_from_hashes(cache.namespace, names_of([(0, 3)], NAMES, GEOMETRY))
    (path,) = tmp_path.glob(f"??/{key.hex()}")
    with path.open("r+b") as file:
        file.seek(4096 + 100)
        file.write(b"\xff\x00" * 8)
    assert engine.finds(engine.arrives(132)) == (96, True)


@pytest.mark.parametrize("how", ["aborted", "nothing to load", "asked again"])
def test_a_request_that_does_not_load_lets_go(made: Callable[..., Engine], how: str) -> None:
    engine = made()
    engine.computes_and_saves()
    request = engine.arrives(132)
    assert engine.finds(request) == (128, True) and engine.claims == 6
    if how == "aborted":
        assert not engine.side.finished(request, ((), ()))[0]
        assert engine.side.has_news
        engine.steps()
        assert not engine.side.has_news
    elif how == "nothing to load":
        assert engine.admits(request, [0] * 5 + [6, 7, 8, 9], list(range(20, 29)), computed=128) == (0, False)
        engine.steps((request, 4))
    else:
        engine.side.after_allocation(request, ((), ()), 0)
        assert engine.finds(request) == (128, True) and engine.claims == 6
        engine.side.finished(request, ((), ()))
        engine.steps()
    assert engine.until(lambda: engine.claims == 0 and engine.leases() == 0)


def test_two_requests_hold_the_same_chunks_and_the_last_lets_go(made: Callable[..., Engine]) -> None:
    engine = made()
    engine.computes_and_saves()
    one, other = engine.arrives(132, "one"), engine.arrives(132, "other")
    assert engine.finds(one) == engine.finds(other) == (128, True)
    assert engine.claims == 6
    engine.side.finished(one, ((), ()))
    engine.steps()
    assert engine.claims == 6
    engine.side.finished(other, ((), ()))
    engine.steps()
    assert engine.until(lambda: engine.claims == 0)


def test_more_than_may_be_held_is_promised_as_it_was_found(made: Callable[..., Engine]) -> None:
    engine = made()
    engine.computes_and_saves()
    claims = engine.worker._lookups.claims
    assert claims is not None
    claims._most = 3
    assert engine.finds(engine.arrives(132)) == (128, True)
    assert engine.claims == 3


def test_without_a_hot_cache_it_is_promised_as_it_was_found(made: Callable[..., Engine], tmp_path: Path) -> None:
    engine = made(local_cpu=False, local_disk=str(tmp_path), max_local_disk_size=1.0)
    window, _ = engine.computes_and_saves()
    assert engine.worker._lookups.claims is None
    request = engine.arrives(132)
    assert engine.admits(request, [0] * 5 + [30, 31, 32, 33], list(range(40, 49))) == (128, True)
    engine.steps()
    assert engine.receives() == set()
    assert torch.equal(engine.content(30, 31, 32), window[:, 5:])


def test_generated_tokens_are_saved_in_all_groups_and_a_reset_hides_them(made: Callable[..., Engine]) -> None:
    engine = made(save_decode_cache=True)
    request = engine.arrives(32)
    engine.admits(request, [1, 2, 3, 4, 5], [20, 21, 22, 23, 24])
    engine.steps((request, 32))
    request.num_tokens, request.block_hashes, request.num_computed_tokens = 64, NAMES[:4], 63
    engine.steps((request, 1))
    assert engine.stored() == {(group, chunk) for group in range(2) for chunk in range(2)}
    engine.side.reset()
    engine.steps()
    assert engine.finds(engine.arrives(132, "after")) == (0, False)


def test_a_turn_names_the_chunks_of_all_groups(made: Callable[..., Engine]) -> None:
    engine = made()
    engine.arrives(132, kv_transfer_params={"tiercache.session": "s"})
    (began,) = engine.steps().turns
    held = [(1, chunk) for chunk in range(4)] + [(0, 3), (0, 2)]
    assert isinstance(began, RequestBegan) and began.names == names_of(held, NAMES, GEOMETRY)
    assert len(all_names(NAMES[:8], GEOMETRY)) == 8


def test_progress_of_saves_is_counted_once_for_all_groups(made: Callable[..., Engine]) -> None:
    engine = made()
    request = engine.arrives(132)
    engine.admits(request, list(range(1, 10)), list(range(20, 29)))
    engine.steps((request, 132))
    engine.stored()
    engine.worker.finished()
    assert engine.worker.take_progress() == StepReport({"r": 1}, set())


def test_computing_a_prefix_costs_what_its_chunks_of_full_attention_stand_for(engine: Engine) -> None:
    """A window has few chunks, however long the prefix: they are no share of what it takes to compute."""
    engine.worker.load(replace(engine.steps(), token_s=0.001))

    async def known() -> float | None:
        return engine.worker.thread.cache.parts.reader.settings.recompute_s

    assert engine.worker.thread.submit(known()).result(10) == pytest.approx(0.001 * GEOMETRY.chunk_tokens)
