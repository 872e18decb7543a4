"""Blocks that the engine takes back are not touched any more."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.blocks import KvBlocks, Lending, Move, TakenBack, make_mover
from tiercache.integrations.vllm.planning import BlockTransfer, KvGroup


def test_no_copy_begins_after_blocks_were_taken_back() -> None:
    lending = Lending()
    with lending:
        pass
    assert lending.take_back(0.0)
    with pytest.raises(TakenBack), lending:
        pytest.fail("the copy ran")


def test_taking_back_waits_for_the_copy_under_way() -> None:
    lending, inside, finish = Lending(), threading.Event(), threading.Event()
    spoilt: list[bool] = []

    def copy() -> None:
        with lending:
            inside.set()
            finish.wait(10)
            try:
                lending.check()
            except TakenBack:
                spoilt.append(True)

    thread = threading.Thread(target=copy)
    thread.start()
    inside.wait(10)
    assert not lending.take_back(0.0)
    finish.set()
    assert lending.take_back(10.0)
    thread.join(10)
    # What it read may have been overwritten, so it must not be stored.
    assert spoilt == [True]


BLOCKS, TOKENS, CONTENT = 8, 16, 32
SPEC = SimpleNamespace(block_size=TOKENS, num_kv_heads=1, num_heads=1, state_content_size_bytes=CONTENT)


class Stops:
    """A worker's cache, and copies out of blocks in host memory that wait for a word."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        gather: Callable[..., None] = KvBlocks.gather

        def waits(kv: KvBlocks, blocks: Any, payload: np.ndarray) -> None:
            self.began.release()
            assert self.go_on.acquire(timeout=30)
            gather(kv, blocks, payload)

        monkeypatch.setattr(KvBlocks, "gather", waits)
        config = Config(max_local_cpu_size=0.01)
        kv = torch.ones((BLOCKS, 1, TOKENS, CONTENT), dtype=torch.uint8)
        self.mover = make_mover(config, {"0": kv}, BLOCKS, [KvGroup(0, TOKENS, spec=SPEC)])
        self.thread = CacheThread(config, Layout("m", chunk_tokens=2 * TOKENS, bytes_per_token=CONTENT))

    def saves(self, chunks: int) -> Move:
        keys = [bytes([number]) * 24 for number in range(chunks)]
        transfers = [BlockTransfer(key, 2, 0, (2 * number, 2 * number + 1)) for number, key in enumerate(keys)]
        return self.mover.put(self.thread, keys, transfers, 10.0)


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stops]:
    made = Stops(monkeypatch)
    yield made
    made.go_on.release(100)
    made.thread.close(10.0)


def test_blocks_in_host_memory_are_free_when_the_last_copy_has_run(stops: Stops) -> None:
    move = stops.saves(2)
    assert stops.began.acquire(timeout=10)
    assert not move.is_off_blocks() and not move.wait(0.01)
    stops.go_on.release(2)
    assert move.wait(10.0) and move.is_off_blocks()
    assert move.future.result(10) == 2


def test_a_save_that_is_taken_back_ends_when_the_cache_has_let_go_of_it(stops: Stops) -> None:
    """Until then a thread still writes into a slot, and whoever counts on the save's end must not go on."""
    move = stops.saves(2)
    assert stops.began.acquire(timeout=10)
    assert not move.take_back(0.0), "a copy is running"
    stops.thread.submit(asyncio.sleep(0)).result(10)  # it has come to the loop
    assert not move.future.done()
    stops.go_on.release(100)
    assert move.take_back(10.0) and move.is_off_blocks()
    with pytest.raises((TakenBack, concurrent.futures.CancelledError)):
        move.future.result(10)
