"""Both halves with two groups of layers, one of which has a window, against a real cache."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm.halves import NAMES, TOKENS, Scheduled, output_of, spec_of
from tiercache.config import Config
from tiercache.control.messages import Prefix
from tiercache.core.keys import keys_from_hashes
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.blocks import make_mover
from tiercache.integrations.vllm.lookup import AnnouncedPrompts, LookupClient
from tiercache.integrations.vllm.metadata import StepWork
from tiercache.integrations.vllm.names import BlockNames
from tiercache.integrations.vllm.planning import BlockGeometry, KvGroup, names_of
from tiercache.integrations.vllm.scheduler import SchedulerSide
from tiercache.integrations.vllm.worker import WorkerSide

BLOCKS, HEADS, HEAD_SIZE = 64, 2, 8
SPEC = spec_of(HEADS, HEAD_SIZE)
WINDOW = KvGroup(0, TOKENS, ("w0", "w1"), 40, SPEC)
FULL = KvGroup(1, TOKENS, ("f0", "f1"), None, SPEC)
GEOMETRY = BlockGeometry(TOKENS, 2, groups=(WINDOW, FULL))
COMPUTED = list(range(1, 10)), list(range(20, 29))
"""Block tables of a request of 132 tokens of which all blocks are there, by group."""
LOADED = [0] * 5 + [30, 31, 32, 33], list(range(40, 49))
"""Those of one that loads 128 tokens: the window keeps three blocks of them."""


def chunks(*which: tuple[int, int]) -> list[bytes]:
    """The names of chunks: (group, chunk)."""
    return names_of(list(which), NAMES, GEOMETRY)


class Engine(Scheduled):
    """vLLM's side of the conversation, and its KV: the layers of both groups lie in the same memory, as vLLM has them."""

    def __init__(self, **settings: Any) -> None:
        config = Config(**({"max_local_cpu_size": 0.01, "close_timeout_s": 5.0} | settings))
        self.kv = torch.randint(-100, 100, (2, BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE)).to(torch.bfloat16)
        tensors = {name: self.kv[number] for group in (WINDOW, FULL) for number, name in enumerate(group.layers)}
        name = uuid.uuid4().hex
        mover = make_mover(config, tensors, BLOCKS, GEOMETRY.groups)
        layout = Layout("m", chunk_tokens=32, bytes_per_token=mover.kvs[0].bytes_per_token, block_tokens=TOKENS)
        self.names = BlockNames("sha256", TOKENS)
        self.worker = WorkerSide(config, GEOMETRY, layout, mover, name, self.names)
        self.thread = self.worker.thread
        self.client = LookupClient(name, 1, GEOMETRY)
        self.side = SchedulerSide(config, GEOMETRY, BlockNames("sha256", TOKENS), self.client, 1)
        self.tables: dict[str, tuple[list[int], ...]] = {}

    def close(self) -> None:
        self.client.close()
        self.worker.close()

    def leases(self) -> int:
        return int(self.on_loop(lambda: sum(self.thread.cache.cpu.budget.held)))

    def content(self, *blocks: int) -> Any:
        return self.kv[:, torch.tensor(blocks)].clone()

    def admits(self, request: Any, *tables: list[int], computed: int = 0) -> tuple[int, bool]:
        self.tables[request.request_id] = tables
        return super().admits(request, *tables, computed=computed)

    def steps(self, *scheduled: tuple[Any, int], new_blocks: tuple[list[int], ...] | None = None) -> StepWork:
        """One step in both halves: planned, begun, computed, and what the worker has to say taken back."""
        work = self.side.step_work(output_of(scheduled, self.tables.__getitem__, new_blocks=new_blocks))
        self.worker.before_blocks_are_given_away(work.preempted, work.given_away)
        self.worker.load(work)
        for request, tokens in scheduled:
            request.num_computed_tokens += tokens
        self.worker.save(work)
        return work

    def receives(self) -> set[str]:
        """Waits for an asynchronous load; returns which have failed."""
        self.until(lambda: self.worker.finished()[1])
        failed = self.worker.take_failed()
        self.side.loads_failed((), failed)
        return failed

    def loads(self, request: Any) -> None:
        """128 tokens, into `LOADED`."""
        assert self.admits(request, *LOADED) == (128, True)
        self.steps()
        assert self.receives() == set()

    def stored(self) -> set[tuple[int, int]]:
        """(group, chunk) of what the cache has, when all that is under way is stored."""
        self.until(lambda: not self.worker._storing)
        return {(group, chunk) for group in range(2) for chunk in range(8) if self.has(*chunks((group, chunk)))}

    def computes_and_saves(self, tokens: int = 132) -> Any:
        """A request with the blocks of `COMPUTED`; returns what the first 128 tokens of its groups have there."""
        request = self.arrives(tokens, "first")
        self.admits(request, *COMPUTED)
        self.steps((request, tokens))
        expected = self.content(*COMPUTED[0][:8]), self.content(*COMPUTED[1][:8])
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


Make = Callable[..., Engine]


@pytest.fixture
def made(opened: Callable[..., Any]) -> Make:
    return partial(opened, Engine)


@pytest.fixture(params=["auto", "cpu"])
def engine(request: pytest.FixtureRequest, made: Make) -> Engine:
    return made(device=request.param)


# Loading


def test_a_hit_fills_the_blocks_that_the_window_keeps_and_all_others(engine: Engine) -> None:
    window, full = engine.computes_and_saves()
    before = engine.content(0)
    engine.loads(engine.arrives(132))
    assert torch.equal(engine.content(30, 31, 32), window[:, 5:])
    assert torch.equal(engine.content(*range(40, 48)), full)
    assert torch.equal(engine.content(0), before), "the null block belongs to nobody"
    assert engine.until(lambda: engine.leases() == 0)


def test_the_last_token_is_left_to_compute_and_windows_are_there_for_the_rest(made: Make) -> None:
    """No more than that is waited for, where another engine stores four whole chunks."""
    engine = made(lookup_timeout_ms=60_000)
    engine.computes_and_saves()
    assert engine.finds(engine.arrives(128)) == (96, True)
    assert engine.finds(engine.arrives(128, "other", kv_transfer_params={"tiercache.expect_tokens": 128})) == (96, True)


def test_a_load_that_fails_begins_again_and_is_not_tried_again(engine: Engine) -> None:
    engine.computes_and_saves()
    request = engine.arrives(132)
    assert engine.admits(request, *LOADED) == (128, True)
    engine.forgets(*chunks((0, 3)))
    engine.steps()
    assert engine.receives() == {"r"}
    assert engine.worker.take_bad_blocks() == set(), "vLLM takes no bad blocks where there are several groups"
    assert engine.until(lambda: engine.leases() == 0)
    request.num_computed_tokens = 0
    assert engine.admits(request, *COMPUTED) == (0, False)
    assert len(engine.steps((request, 132)).saves[0].transfers) == 8, "what was computed is stored anew"


@pytest.mark.parametrize("window", [[0] * 9, [0] * 4 + [29, *LOADED[0][5:]]], ids=["too few", "one too many"])
def test_a_load_that_does_not_fill_the_blocks_of_the_engine_fails(made: Make, window: list[int]) -> None:
    engine = made()
    engine.computes_and_saves()
    assert engine.admits(engine.arrives(132), window, LOADED[1]) == (128, True)
    (load,) = engine.steps().loads
    assert load.impossible and not load.transfers
    assert engine.receives() == {"r"}


# Saving


def test_a_block_that_is_given_away_is_read_before_and_others_are_not_waited_for(made: Make) -> None:
    engine = made()
    request, other = engine.arrives(132), engine.arrives(16, "other", block_hashes=[b"o" * 32])
    engine.admits(request, *COMPUTED)
    go_on = engine.stops_its_loop()
    engine.steps((request, 132))
    engine.steps((request, 0), new_blocks=([60], [61]))
    assert not go_on.is_set()
    expected = engine.content(*range(1, 9))
    timer = threading.Timer(0.05, go_on.set)
    timer.start()
    engine.tables["other"] = [3], [50]
    work = engine.steps((other, 1), new_blocks=([3], [50]))
    assert work.given_away == {3, 50} and go_on.is_set(), "the step waits for the copy of what it gives away"
    engine.kv[:, torch.tensor([3])] = 0
    engine.stored()
    engine.ends(request)
    engine.loads(engine.arrives(132, "again"))
    assert torch.equal(engine.content(30, 31, 32), expected[:, 5:])


def test_blocks_that_a_new_request_shares_are_not_waited_for(made: Make) -> None:
    """They are read, and by the engine as well. A group that is not cached has blocks, too."""
    blocks = [0, 2, 3, 4, 30], [20, 21, 22, 23, 40], [61]
    output = output_of([], lambda _: ([],))
    output.scheduled_new_reqs = [SimpleNamespace(req_id="new", num_computed_tokens=64, block_ids=blocks)]
    output.scheduled_cached_reqs = SimpleNamespace(
        req_ids=["resumed", "running"],
        num_computed_tokens=[32, 96],
        new_block_ids=[([5, 6, 31], [24, 25, 41]), ([32], [42])],
        resumed_req_ids={"resumed"},
    )
    output.kv_cache_block_copies = [SimpleNamespace(src_block_id=1, dst_block_id=50)]
    output.num_scheduled_tokens = {"new": 1, "resumed": 1, "running": 1}
    assert made().side.step_work(output).given_away == {30, 40, 61, 31, 41, 32, 42, 50}


# What other parts of the cache are told


def test_blocks_that_another_connector_fills_are_given_away_too(made: Make) -> None:
    """vLLM's MultiConnector tells every connector which blocks a request gets, and 0 tokens if another one loads them."""
    engine = made()
    assert engine.admits(engine.arrives(132), *COMPUTED) == (0, False)
    assert engine.steps().given_away == {*COMPUTED[0], *COMPUTED[1]}


def test_an_announced_prompt_is_the_chunks_of_all_groups(made: Make) -> None:
    engine = made()
    cache = engine.thread.cache
    naming = AnnouncedPrompts(BlockNames("sha256", TOKENS), GEOMETRY)
    prefix = Prefix(tokens=list(range(132)))

    async def announced() -> tuple[list[bytes], list[bytes], list[bytes]]:
        names = await naming.names.of_tokens(prefix.tokens or (), "", None)
        stored = names_of([(group, chunk) for group in range(2) for chunk in range(2)], names, GEOMETRY)
        for key in keys_from_hashes(cache.namespace, stored):
            await cache.put(key, b"x" * 2048)
        return names, await naming.keys(cache, prefix), await naming.all_keys(cache, prefix)

    names, keys, all_keys = engine.ask(announced())
    found = [(1, 0), (1, 1), (0, 1), (0, 0)]
    missing = [(1, 2), (1, 3), (0, 3), (0, 2)]
    assert keys == engine.keys(*names_of([*found, *missing], names, GEOMETRY))
    assert set(all_keys) == set(keys) and len(all_keys) == 8
