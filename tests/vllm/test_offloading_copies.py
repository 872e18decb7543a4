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

from tiercache.integrations.vllm_offloading.cpu_spec import HostCopies

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


def test_blocks_come_back_into_other_blocks(made: Callable[..., Copies]) -> None:
    copies = made(ALL_LAYERS, 1)
    assert copies.store([1, 4], [3, 0], [2], [0]).transfer_size == 2 * 4 * PAGE
    copies.load([0, 5], [3, 0], [2], [0])
    for tensor, old in zip(copies.tensors, copies.before, strict=True):
        assert tensor[0].equal(old[1]) and tensor[5].equal(old[4])
        assert not tensor[1:5].any()


def test_a_prefix_may_begin_in_the_middle_of_a_chunk(made: Callable[..., Copies]) -> None:
    """Two blocks a chunk; the load needs the second block of the first one, and both of the next."""
    copies = made(ALL_LAYERS, 2)
    copies.store([0, 1, 2, 3], [2, 1], [4], [0])
    copies.load([1, 4, 5], [2, 1], [3], [1])
    for tensor, old in zip(copies.tensors, copies.before, strict=True):
        assert tensor[1].equal(old[1]) and tensor[4].equal(old[2]) and tensor[5].equal(old[3])
        assert not tensor[0].any() and not tensor[2:4].any()


def test_groups_have_rows_of_their_own(made: Callable[..., Copies]) -> None:
    """A window's group begins at another block than the one of layers that see every token, and one may have nothing."""
    copies = made([[(0, PAGE), (1, PAGE)], [(2, PAGE)], [(0, PAGE)]], 1)
    copies.store([1, 2, 5], [0, 1, 2], [2, 1, 0], [0, 1, 0])
    copies.load([3, 4, 0], [0, 1, 2], [2, 1, 0], [0, 1, 0])
    tensors, before = copies.tensors, copies.before
    for number in (0, 1):
        assert tensors[number][3].equal(before[number][1]) and tensors[number][4].equal(before[number][2])
    assert tensors[2][0, :PAGE].equal(before[2][5, :PAGE])
    assert not tensors[2][0, PAGE:].any()
