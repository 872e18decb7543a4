"""The worker's half with a real cache: blocks in host memory, and on the CPU twin with streams held back."""

from __future__ import annotations

import concurrent.futures
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.device.twin import TwinDriver
from tests.vllm.halves import NAMES, TOKENS, Cached, spec_of
from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.errors import LayoutError
from tiercache.integrations.lending import TakenBack
from tiercache.integrations.vllm import worker as worker_module
from tiercache.integrations.vllm.blocks import KvBlocks, Move, make_mover
from tiercache.integrations.vllm.hints import RequestEnded, Wishes
from tiercache.integrations.vllm.metadata import Load, Save, StepWork
from tiercache.integrations.vllm.names import BlockNames
from tiercache.integrations.vllm.planning import BlockGeometry, BlockTransfer, KvGroup
from tiercache.integrations.vllm.worker import WorkerSide

GEOMETRY = BlockGeometry(TOKENS, blocks_per_chunk=2)
BLOCKS, LAYERS, HEADS, HEAD_SIZE = 32, 3, 2, 8
GROUPS = [KvGroup(0, TOKENS, spec=spec_of(HEADS, HEAD_SIZE))]
SHAPE = (LAYERS, BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE)


class EngineTwin(TwinDriver):
    """Only the engine's thread has the engine's stream, as with torch's. Copies to the host and from it can be held back."""

    copies_wait_for: threading.Event | None = None

    def __init__(self, total_bytes: int) -> None:
        super().__init__(total_bytes)
        self._of_others = self.make_stream()

    def current_stream(self) -> Any:
        engine = threading.current_thread() is threading.main_thread()
        return super().current_stream() if engine else self._of_others

    def copy(self, destination: Any, source: Any, stream: Any) -> None:
        if self.copies_wait_for is not None:
            stream.enqueue(self.copies_wait_for.wait)
        super().copy(destination, source, stream)


class Worker(Cached):
    """A worker's half, the engine's KV, and the engine's stream where there is one."""

    def __init__(self, geometry: BlockGeometry = GEOMETRY, **settings: Any) -> None:
        self.kv = [layer.clone() for layer in torch.randint(-100, 100, SHAPE).to(torch.bfloat16)]
        config = Config(**({"max_local_cpu_size": 0.01, "close_timeout_s": 5.0} | settings))
        mover = make_mover(config, {f"layer.{number}": layer for number, layer in enumerate(self.kv)}, BLOCKS, GROUPS)
        token_bytes, kind = mover.kvs[0].bytes_per_block // TOKENS, mover.kvs[0].describe()
        layout = Layout("m", geometry.chunk_tokens, token_bytes, block_tokens=TOKENS, byte_format=kind)
        self.side = WorkerSide(config, geometry, layout, mover, uuid.uuid4().hex, BlockNames("sha256", TOKENS))
        self.thread = self.side.thread
        self.mover = mover

    def close(self) -> None:
        self.side.close()
        if self.mover.driver is not None:
            self.driver.close()

    @property
    def driver(self) -> EngineTwin:
        assert isinstance(self.mover.driver, EngineTwin)
        return self.mover.driver

    def content(self, *blocks: int) -> Any:
        return torch.stack([layer[torch.tensor(blocks)] for layer in self.kv])

    def erase(self, *blocks: int) -> None:
        for layer in self.kv:
            layer[torch.tensor(blocks)] = 0

    def saves(self, *transfers: BlockTransfer, name: str = "r") -> None:
        self.side.save(StepWork(saves=[Save(name, list(transfers), 64)]))

    def stores(self, *transfers: BlockTransfer) -> None:
        """Waits until the cache has the chunks too, which may be after the blocks are free."""
        self.saves(*transfers)
        self.is_saved()
        self.until(lambda: all(self.has(transfer.name) for transfer in transfers))

    def is_saved(self, name: str = "r") -> None:
        """Waits for the saves under way."""
        self.side.save(StepWork(held={name}))
        self.until(lambda: name in self.side.finished()[0])
        progress = self.side.take_progress()
        assert progress is not None and progress.saves == {name: 1}

    def loads(self, *transfers: BlockTransfer, later: bool = False, name: str = "r") -> None:
        self.side.load(StepWork(loads=[Load(name, list(transfers), later, name)]))

    def hold(self) -> threading.Event:
        """Whatever the engine gives its stream from now on waits for the event to be set."""
        held = threading.Event()
        self.driver.current_stream().enqueue(held.wait)
        return held

    def computes(self, block: int, value: int) -> None:
        """A step on the engine's stream fills a block."""
        for layer in self.kv:
            row = layer[block].view(torch.uint8)
            self.driver.enqueue(self.driver.current_stream(), partial(row.fill_, value))


Make = Callable[..., Worker]


@pytest.fixture
def made(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr("tiercache.assembly.Driver", EngineTwin)
    return partial(opened, Worker)


@pytest.fixture(params=["auto", "cpu"])
def worker(request: pytest.FixtureRequest, made: Make) -> Worker:
    return made(device=request.param)


@pytest.fixture
def twin(made: Make) -> Worker:
    return made(device="cpu")


FIRST = BlockTransfer(NAMES[1], 2, 0, (4, 9))
SECOND = BlockTransfer(NAMES[3], 2, 0, (7, 3))
THIRD = BlockTransfer(NAMES[5], 2, 0, (5, 6))


def into(transfer: BlockTransfer, *blocks: int) -> BlockTransfer:
    """The end of the same chunk, into other blocks."""
    return BlockTransfer(transfer.name, transfer.chunk_blocks, transfer.chunk_blocks - len(blocks), blocks)


# In host memory and in device memory


def assert_figures(worker: Worker, outcomes: dict[str, int], load_blocks: int, store_blocks: int = 0) -> None:
    """Assert which loads and stores have ended since the last call."""
    new = worker.side.figures.take()
    assert new is not None
    counters, block_bytes = new.data["counters"], worker.mover.kvs[0].bytes_per_block
    assert counters["tiercache_loads"] == {(outcome,): count for outcome, count in outcomes.items()}
    assert counters["vllm:kv_offload_load_bytes"] == {(): load_blocks * block_bytes}
    assert counters.get("vllm:kv_offload_store_bytes", {}).get((), 0) == store_blocks * block_bytes


def test_saved_blocks_come_back_in_others_and_those_that_are_gone_are_reported(worker: Worker) -> None:
    expected = worker.content(4, 9, 7, 3)
    worker.stores(FIRST, SECOND)
    worker.erase(4, 9, 7, 3)
    worker.loads(into(FIRST, 20, 21), into(SECOND, 30, 1))
    assert torch.equal(worker.content(20, 21, 30, 1), expected)
    progress = worker.side.take_progress()
    assert progress is not None and progress.loads == {"r"}
    assert_figures(worker, {"whole": 1}, load_blocks=4, store_blocks=4)
    worker.loads(into(SECOND, 11))
    assert torch.equal(worker.content(11), expected[:, 3:])
    assert worker.side.take_bad_blocks() == set()
    worker.loads(into(FIRST, 22, 23), into(THIRD, 24, 25))
    assert torch.equal(worker.content(22, 23), expected[:, :2])
    assert worker.side.take_bad_blocks() == {24, 25}
    assert worker.side.take_bad_blocks() == set()
    worker.side.load(StepWork(loads=[Load("r", [], False, "r", impossible=(26, 27))]))
    assert worker.side.take_bad_blocks() == {26, 27}
    assert_figures(worker, {"whole": 1, "part": 1, "failed": 1}, load_blocks=3)


def test_what_is_held_for_a_request_comes_whatever_became_of_it(worker: Worker) -> None:
    """Others may go on with the blocks of a synchronous load: it must not fail."""
    expected = worker.content(4, 9, 7, 3)
    worker.stores(FIRST, SECOND)
    names, lookups, budget = [b"", FIRST.name, b"", SECOND.name], worker.side._lookups, worker.thread.cache.cpu.budget
    match = worker.ask(lookups.find(names, "r"))
    assert (match.blocks, match.held) == (4, True)
    worker.forgets(FIRST.name, SECOND.name)
    assert not worker.has(FIRST.name)
    worker.loads(into(FIRST, 20, 21), into(SECOND, 30, 1))
    assert worker.side.take_bad_blocks() == set()
    assert torch.equal(worker.content(20, 21, 30, 1), expected)
    assert worker.on_loop(lambda: (len(lookups.claims.leases), sum(budget.held))) == (0, 0)


def test_what_a_request_wants_forgotten_or_pinned_waits_until_it_is_stored(worker: Worker) -> None:
    """The saves are of the step that brings the request's last words, and have not begun then. What others had stored stays:
    it came out of the engine's own prefix cache, so the request saves all of its prompt."""
    cache = worker.thread.cache
    worker.stores(THIRD)
    go_on = worker.stops_its_loop()
    forgotten = RequestEnded("r", Wishes(forget=True), [FIRST.name, THIRD.name])
    pinned = RequestEnded("q", Wishes(pin_s=60.0), [SECOND.name])
    saves = [Save("r", [THIRD, FIRST], 64, to_be_forgotten=True), Save("q", [SECOND], 64)]
    worker.side.save(StepWork(saves=saves, turns=[forgotten, pinned]))
    go_on.set()
    worker.until(lambda: cache.ahead.pinned == 1)
    worker.until(lambda: cache.cpu.statistics().writes == 3 and not worker.has(FIRST.name))
    assert worker.has(SECOND.name) and worker.has(THIRD.name)


def test_wishes_that_cannot_be_granted_harm_nobody(made: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Without a hot cache there is nothing to prefetch into: one warning, and the engine goes on."""
    worker = made(device="auto", local_cpu=False)
    for _ in range(3):
        worker.side.save(StepWork(turns=[RequestEnded("r", Wishes(next_in_s=1.0), [FIRST.name])]))
    worker.until(lambda: "local_cpu is false" in caplog.text)
    assert caplog.text.count("has no effect") == 1


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_tail_leaves_the_hot_cache_when_its_whole_chunk_is_stored(made: Make, tmp_path: Path, device: str) -> None:
    geometry = BlockGeometry.for_chunk_size(GEOMETRY.chunk_tokens, TOKENS, save_tails=True)
    worker = made(geometry, device=device, local_disk=str(tmp_path), max_local_disk_size=0.1)
    cache, tail = worker.thread.cache, BlockTransfer(NAMES[2], 1, 0, (7,))
    worker.stores(FIRST, tail)
    assert worker.ask(cache.flush(10)).complete
    on_disk = [worker.on_loop(lambda key=key: cache.tiers[0].contains(key)) for key in worker.keys(NAMES[1], NAMES[2])]
    assert on_disk == [True, True]
    expected = worker.content(7)
    worker.erase(7)
    worker.loads(tail)
    assert torch.equal(worker.content(7), expected)
    worker.side.save(StepWork(saves=[Save("r", [SECOND], 64, replaced=tail.name)]))
    worker.until(lambda: worker.has(SECOND.name))
    worker.until(lambda: not worker.on_loop(lambda: cache.lookup_hot(worker.keys(tail.name))))
    assert worker.has(tail.name), "on the disk"


def test_a_prompt_larger_than_the_cache_keeps_its_head_though_each_step_stores_a_part(worker: Worker) -> None:
    cache = worker.thread.cache
    names = [number.to_bytes(32, "big") for number in range(cache.cpu.pool.count * 3 // 2)]
    for start in range(0, len(names), 64):
        part = [BlockTransfer(name, 2, 0, (4, 9)) for name in names[start : start + 64]]
        previous = names[start - 1] if start else b""
        worker.side.save(StepWork(saves=[Save("r", part, 64, previous=previous)]))
        worker.is_saved()
    found = worker.ask(cache.lookup_keys(worker.keys(*names)))
    assert found.chunks > cache.cpu.pool.count // 3


def test_save_that_never_began_is_cut_short_by_a_preemption(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_PREEMPTION_WAIT_S", 0.01)
    go_on = worker.stops_its_loop()
    worker.saves(FIRST)
    worker.side.before_blocks_are_given_away(["r"])
    worker.erase(4, 9)
    go_on.set()
    worker.is_saved()  # it has ended, as far as the engine is concerned
    assert not worker.has(FIRST.name)


def test_a_save_that_is_taken_back_ends_with_its_copy(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a thread still writes into a slot, so the end of the save must not be reported. It is not stored: the
    bytes that it read may have been overwritten."""
    worker, began, go_on, gather = made(), threading.Event(), threading.Event(), KvBlocks.gather

    def waits(kv: KvBlocks, blocks: Any, payload: Any) -> None:
        began.set()
        assert go_on.wait(30)
        gather(kv, blocks, payload)

    monkeypatch.setattr(KvBlocks, "gather", waits)
    move = worker.mover.put(worker.thread, worker.keys(FIRST.name, SECOND.name), [FIRST, SECOND], 10.0)
    assert began.wait(10)
    assert not move.is_off_blocks() and not move.wait(0.01)
    assert not move.take_back(0.0), "a copy is running"
    worker.on_loop(lambda: None)  # it has come to the loop
    assert not move.future.done()
    go_on.set()
    assert move.take_back(10.0) and move.is_off_blocks()
    with pytest.raises((TakenBack, concurrent.futures.CancelledError)):
        move.future.result(10)
    assert not worker.has(FIRST.name)


def test_late_load_never_writes_to_blocks_that_were_given_away(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.stores(FIRST)
    monkeypatch.setattr(worker_module, "_MARGIN_S", 0.02 - worker.side.config.blocking_timeout_secs)
    go_on = worker.stops_its_loop()
    worker.loads(into(FIRST, 20, 21))
    assert worker.side.take_bad_blocks() == {20, 21}
    worker.erase(20, 21)
    go_on.set()
    assert worker.has(FIRST.name)
    assert not worker.content(20, 21).any()


def test_engine_goes_on_without_its_cache(worker: Worker) -> None:
    worker.thread.close(1.0)
    worker.saves(FIRST)
    worker.loads(into(FIRST, 20, 21))
    assert worker.side.take_bad_blocks() == {20, 21}
    worker.is_saved()
    worker.side.load(StepWork(generation=b"after a reset", token_s=0.001))


# With streams held back


def test_save_reads_what_the_forward_wrote(twin: Worker) -> None:
    held = twin.hold()
    twin.computes(4, 7)
    twin.computes(9, 8)
    before = twin.content(4, 9)
    twin.saves(FIRST)
    assert twin.side.finished() == (set(), set())
    twin.side.save(StepWork(held={"r"}))
    assert twin.has(SECOND.name) is False  # the cache's thread has had its turn
    assert twin.side.finished() == (set(), set()), "its blocks are still held"
    assert torch.equal(twin.content(4, 9), before)
    held.set()
    twin.is_saved()
    twin.until(lambda: twin.has(FIRST.name))
    written = twin.content(4, 9)
    assert not torch.equal(written, before)
    twin.loads(into(FIRST, 20, 21))
    assert torch.equal(twin.content(20, 21), written)


def test_blocks_are_free_when_they_are_gathered(twin: Worker) -> None:
    """Not only when the chunk has come to the host: nothing but the gathering reads them."""
    held = twin.driver.copies_wait_for = threading.Event()
    expected = twin.content(4, 9)
    twin.saves(FIRST)
    twin.is_saved()
    twin.erase(4, 9)
    assert not twin.has(FIRST.name)
    held.set()
    twin.until(lambda: twin.has(FIRST.name))
    twin.loads(into(FIRST, 20, 21))
    assert torch.equal(twin.content(20, 21), expected)


def test_load_writes_after_what_the_engine_still_reads(twin: Worker) -> None:
    expected, old = twin.content(4, 9), twin.content(20)
    twin.stores(FIRST)
    probe = torch.zeros_like(twin.kv[0][20])
    held = twin.hold()
    twin.driver.copy(probe, twin.kv[0][20], twin.driver.current_stream())
    twin.loads(into(FIRST, 20, 21), later=True)
    assert twin.has(FIRST.name)
    assert twin.side.finished() == (set(), set())
    assert torch.equal(twin.content(20), old)
    held.set()
    twin.until(lambda: twin.side.finished()[1] == {"r"})
    assert torch.equal(probe, old[0][0]), "the earlier step read what was there"
    assert torch.equal(twin.content(20, 21), expected)


def test_preempted_blocks_are_waited_for_and_others_are_not(twin: Worker) -> None:
    held = twin.hold()
    twin.computes(4, 7)
    twin.saves(FIRST)
    twin.saves(SECOND, name="other")
    assert not twin.has(NAMES[9])  # the cache's thread has had its turn
    twin.side.before_blocks_are_given_away(["nobody"])
    assert not held.is_set()
    timer = threading.Timer(0.05, held.set)
    timer.start()
    twin.side.before_blocks_are_given_away(["r"])
    assert held.is_set()
    expected = twin.content(4, 9)
    twin.erase(4, 9)
    twin.until(lambda: twin.has(FIRST.name))
    twin.loads(into(FIRST, 20, 21))
    assert torch.equal(twin.content(20, 21), expected)


def test_copy_that_does_not_end_in_time_comes_before_the_engines_next_work(
    twin: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A load is late and its last copy cannot be stopped: what the engine then computes into the blocks must stay."""
    twin.stores(FIRST)
    monkeypatch.setattr(worker_module, "_MARGIN_S", 0.1 - twin.side.config.blocking_timeout_secs)
    monkeypatch.setattr(worker_module, "_COPY_WAIT_S", 0.02)
    on_device = twin.thread.cache.parts.on_device
    assert on_device is not None
    held = threading.Event()
    on_device.device.loading.stream.enqueue(held.wait)
    twin.loads(into(FIRST, 20, 21))
    assert twin.side.take_bad_blocks() == {20, 21}
    assert "a copy of 0.02 seconds and more" in caplog.text
    twin.computes(20, 5)
    twin.computes(21, 5)
    held.set()
    driver = twin.driver
    driver.synchronize(driver.record(driver.current_stream()))
    assert (twin.content(20, 21).view(torch.uint8) == 5).all()


def test_closing_waits_for_all_saves_together(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_COPY_WAIT_S", 0.0)
    twin, limits_s, wait = made(device="cpu", close_timeout_s=0.05), [], Move.wait

    def waits(move: Move, limit_s: float) -> bool:
        limits_s.append(limit_s)
        ended = wait(move, limit_s)
        if len(limits_s) == 3:  # for the first save, while its blocks are taken back, and for the second save
            held.set()
        return ended

    monkeypatch.setattr(Move, "wait", waits)
    held = twin.hold()
    twin.saves(FIRST)
    twin.saves(SECOND, name="other")
    twin.side.close()
    assert sum(limits_s) <= 0.05


def test_lost_device_costs_the_cache_and_not_the_engine(twin: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_COPY_WAIT_S", 0.02)
    monkeypatch.setattr(worker_module, "_PREEMPTION_WAIT_S", 0.02)
    twin.stores(FIRST)
    held = twin.hold()
    twin.saves(SECOND)
    twin.driver.lose()
    held.set()
    twin.loads(into(FIRST, 20, 21))
    assert twin.side.take_bad_blocks() == {20, 21}
    twin.saves(SECOND, name="later")
    twin.side.before_blocks_are_given_away(["r"])
    progress = twin.side.take_progress()
    assert progress is not None and progress.saves == {"later": 1}


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_kv_that_layers_share_is_moved_once(device: str) -> None:
    own, shared = torch.zeros(SHAPE, dtype=torch.bfloat16)[:2]
    layers = {"0": own, "1": shared, "2": own, "3": shared}
    (kv,) = make_mover(Config(device=device), layers, BLOCKS, GROUPS).kvs
    assert (kv.layers, kv.bytes_per_block) == (2, 2 * HEADS * TOKENS * 2 * HEAD_SIZE * 2)


@pytest.mark.parametrize(
    ("devices", "settings", "found"),
    [
        (["cpu", "meta"], {}, "expected the KV of all layers on one device, found cpu, meta"),
        (["meta"], {}, "expected KV in host memory or on a CUDA GPU, found it on meta"),
        (["cuda:1"], {"device": "none"}, "the KV lies on cuda:1, and the configuration says device: none"),
        ([], {}, "no KV"),
    ],
)
def test_kv_that_cannot_be_moved_is_refused(devices: list[str], settings: dict[str, Any], found: str) -> None:
    tensors = {str(number): SimpleNamespace(device=torch.device(name)) for number, name in enumerate(devices)}
    with pytest.raises(LayoutError, match=found):
        make_mover(Config(**settings), tensors, BLOCKS, GROUPS)
