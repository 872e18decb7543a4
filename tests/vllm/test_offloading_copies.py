"""Copies between the engine's blocks and rows of vLLM's CPU tier, in memory."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from tests.vllm.cpu_spec import HostCopies

BLOCKS, PAGE, CHUNKS = 6, 4096, 4
ALL_LAYERS = [[(0, PAGE), (1, PAGE), (2, 2 * PAGE)]]


class Copies:
    def __init__(self, groups: list[list[tuple[int, int]]], per_chunk: int) -> None:
        """`groups`: of each layer, the number of its tensor and the bytes that are in use of its page."""
        both = torch.randint(-128, 128, (2, BLOCKS, PAGE), dtype=torch.int8)
        self.tensors = [both[0], both[1], torch.randint(-128, 128, (BLOCKS, 2 * PAGE), dtype=torch.int8)]
        """Two layers of one storage, and one of another kind that lies elsewhere."""
        self.before = [tensor.clone() for tensor in self.tensors]
        row = sum(tensor.shape[1] for tensor in self.tensors) * per_chunk
        self.region = SharedOffloadRegion(uuid.uuid4().hex, CHUNKS, 0, row, row)
        refs = [[CanonicalKVCacheRef(number, used) for number, used in group] for group in groups]
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(one, one.shape[1]) for one in self.tensors], refs)
        self.copies = HostCopies(caches, per_chunk, self.region)

    def close(self) -> None:
        self.copies.shutdown()

    def store(self, blocks: list[int], chunks: list[int], sizes: list[int], first: list[int]) -> Any:
        """And nothing is left in the blocks."""
        assert self.copies.submit_store(1, GPULoadStoreSpec(blocks, sizes, first), CPULoadStoreSpec(chunks))
        ended = self._ended(1)
        for tensor in self.tensors:
            tensor.zero_()
        return ended

    def load(self, blocks: list[int], chunks: list[int], sizes: list[int], first: list[int]) -> None:
        assert self.copies.submit_load(2, CPULoadStoreSpec(chunks), GPULoadStoreSpec(blocks, sizes, first))
        self._ended(2)

    def _ended(self, number: int) -> Any:
        self.copies.wait({number})
        (ended,) = self.copies.get_finished()
        assert (ended.job_id, ended.success) == (number, True)
        return ended


@pytest.fixture
def made(opened: Callable[..., Any]) -> Callable[..., Copies]:
    return partial(opened, Copies)


Spec = tuple[list[int], list[int], list[int], list[int]]


@pytest.mark.parametrize(
    ("groups", "per_chunk", "stored", "loaded", "came"),
    [
        (ALL_LAYERS, 1, ([1, 4], [3, 0], [2], [0]), ([0, 5], [3, 0], [2], [0]), [{0: 1, 5: 4}] * 3),
        (ALL_LAYERS, 2, ([0, 1, 2, 3], [2, 1], [4], [0]), ([1, 4, 5], [2, 1], [3], [1]), [{1: 1, 4: 2, 5: 3}] * 3),
        (
            [[(0, PAGE), (1, PAGE)], [(2, PAGE)], [(0, PAGE)]],
            1,
            ([1, 2, 5], [0, 1, 2], [2, 1, 0], [0, 1, 0]),
            ([3, 4, 0], [0, 1, 2], [2, 1, 0], [0, 1, 0]),
            [{3: 1, 4: 2}, {3: 1, 4: 2}, {0: 5}],
        ),
    ],
    ids=["other blocks", "from the middle of a chunk", "a group of a window, and one with nothing"],
)
def test_blocks_come_back_into_other_blocks(
    made: Callable[..., Copies],
    groups: list[list[tuple[int, int]]],
    per_chunk: int,
    stored: Spec,
    loaded: Spec,
    came: list[dict[int, int]],
) -> None:
    """`came` has for each tensor the blocks that are filled, and where their content was. The unused end of a page stays."""
    copies = made(groups, per_chunk)
    moved_bytes = sum(blocks * sum(used for _, used in group) for group, blocks in zip(groups, stored[2], strict=False))
    assert copies.store(*stored).transfer_size == moved_bytes
    copies.load(*loaded)
    used = {number: size for group in groups for number, size in group}
    for number, (tensor, old) in enumerate(zip(copies.tensors, copies.before, strict=True)):
        expected = torch.zeros_like(tensor)
        for block, source in came[number].items():
            expected[block, : used[number]] = old[source, : used[number]]
        assert tensor.equal(expected)


def test_a_load_that_a_step_waits_for_fills_its_blocks(made: Callable[..., Copies]) -> None:
    """vLLM 0.33 says of it that it is expedited."""
    copies = made(ALL_LAYERS, 1)
    copies.store([1], [0], [1], [0])
    assert copies.copies.submit_load(2, CPULoadStoreSpec([0]), GPULoadStoreSpec([2], [1], [0]), expedited=True)
    copies.copies.wait({2})
    assert all(tensor[2].equal(old[1]) for tensor, old in zip(copies.tensors, copies.before, strict=True))
