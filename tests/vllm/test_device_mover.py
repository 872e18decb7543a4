"""Blocks of a device through a real cache, without vLLM: on tensors in host memory, and on a GPU where torch has one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.blocks import make_mover
from tiercache.integrations.vllm.planning import BlockTransfer, KvGroup

BLOCKS, LAYERS, HEADS, TOKENS, CONTENT, CHUNK_BLOCKS = 64, 4, 2, 16, 32, 4
SPEC = SimpleNamespace(block_size=TOKENS, num_kv_heads=HEADS, num_heads=HEADS, state_content_size_bytes=2 * CONTENT)
GROUPS = [KvGroup(0, TOKENS, spec=SPEC)]
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
DEVICES = ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]


class Engine:
    """KV in one of vLLM's orders, a cache, and what moves blocks between them."""

    def __init__(self, device: str, order: str, directory: Path) -> None:
        memory = torch.empty([SIZES[letter] for letter in order], dtype=torch.bfloat16, device=device)
        self.kv = memory.permute([order.index(letter) for letter in "LBHNC"])
        self.fill(range(BLOCKS), seed=1)
        gds = {"gds_path": (str(directory),), "gds_buffer_size": 8, "use_gds": False}
        config = Config(max_local_cpu_size=0.02, device="cpu" if device == "cpu" else "auto", **gds)
        self.mover = make_mover(config, {str(number): layer for number, layer in enumerate(self.kv)}, BLOCKS, GROUPS)
        assert self.mover.driver is not None
        (kv,) = self.mover.kvs
        layout = Layout("m", CHUNK_BLOCKS * TOKENS, kv.bytes_per_block // TOKENS, byte_format=kv.describe())
        self.thread = CacheThread(config, layout, device=self.mover.driver)

    def close(self) -> None:
        self.thread.close(10.0)

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        """On the engine's own stream, not waiting for it."""
        shape = (LAYERS, len(blocks), HEADS, TOKENS, CONTENT)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        self.kv[:, torch.tensor(blocks)] = values.to(self.kv.device, non_blocking=True)

    def content(self, blocks: Sequence[int]) -> Any:
        return self.kv[:, torch.tensor(blocks)].cpu()

    def put(self, keys: Sequence[bytes], chunks: Sequence[tuple[int, ...]]) -> int:
        transfers = [BlockTransfer(key, CHUNK_BLOCKS, 0, blocks) for key, blocks in zip(keys, chunks, strict=True)]
        move = self.mover.put(self.thread, keys, transfers, 10.0)
        assert move.wait(10.0)
        # Whatever comes now is not stored.
        self.fill([block for blocks in chunks for block in blocks], seed=99)
        return move.future.result(30)

    def get(self, keys: Sequence[bytes], chunks: Sequence[tuple[int, ...]]) -> int:
        parts = [(key, CHUNK_BLOCKS - len(blocks), blocks) for key, blocks in zip(keys, chunks, strict=True)]
        transfers = [BlockTransfer(key, CHUNK_BLOCKS, skip, blocks) for key, skip, blocks in parts]
        move = self.mover.get(self.thread, keys, transfers, 10.0)
        arrived = move.future.result(30)
        assert move.is_off_blocks()
        return arrived

    async def clear_hot(self) -> None:
        await self.thread.cache.flush()
        self.thread.cache.clear_hot()


@pytest.fixture(params=[(device, order) for device in DEVICES for order in ORDERS], ids="-".join)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with closing(Engine(*request.param, tmp_path)) as made:
        yield made


def test_blocks_come_back_from_the_host_and_from_gds(engine: Engine) -> None:
    keys = [number.to_bytes(24, "big") for number in range(6)]
    old = [tuple(range(4 * number, 4 * number + 4))[::-1] for number in range(6)]
    new = [(60 - number, 30 + number, 52 - number, 40 + number) for number in range(6)]
    sources, targets = ([block for blocks in chunks for block in blocks] for chunks in (old, new))
    untouched = [block for block in range(24, BLOCKS) if block not in targets]
    engine.fill(range(24), seed=7)
    expected, before = engine.content(sources), engine.content(untouched)
    engine.fill(range(24), seed=7)
    assert engine.put(keys, old) == 6
    for place in ("hot", "gds"):
        if place == "gds":
            engine.thread.submit(engine.clear_hot()).result(30)
        engine.fill(targets, seed=50)
        assert engine.get(keys, new) == 6
        assert torch.equal(engine.content(targets), expected), place
        assert torch.equal(engine.content(untouched), before)
        engine.fill(targets, seed=51)
        assert engine.get(keys[2:4], [(33, 44), (55,)]) == 2
        assert torch.equal(engine.content([33, 44, 55]), expected[:, [10, 11, 15]])


def test_copies_wait_for_the_engine_and_the_engine_for_nothing(engine: Engine) -> None:
    """On a GPU the forward is still running when the put begins; handing it over takes no longer for that."""
    key = bytes(24)
    if engine.kv.is_cuda:
        torch.cuda._sleep(200_000_000)
    engine.fill((3, 1, 2, 0), seed=11)
    began_s = time.perf_counter()
    move = engine.mover.put(engine.thread, [key], [BlockTransfer(key, 4, 0, (3, 1, 2, 0))], 10.0)
    took_s = time.perf_counter() - began_s
    if engine.kv.is_cuda:
        assert took_s < 0.02
        assert not move.is_off_blocks()
    assert move.future.result(30) == 1
    assert engine.get([key], [(10, 11, 12, 13)]) == 1
    assert torch.equal(engine.content([10, 11, 12, 13]), engine.content([3, 1, 2, 0]))
