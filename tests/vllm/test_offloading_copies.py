"""Copies between the engine's blocks and rows of vLLM's CPU tier, in memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

BLOCKS, PAGE, CHUNKS = 6, 4096, 4


@pytest.fixture
def tensors() -> list[Any]:
    """Two layers of one storage, and one of another kind that lies elsewhere."""
    import torch

    both = torch.randint(-128, 128, (2, BLOCKS, PAGE), dtype=torch.int8)
    return [both[0], both[1], torch.randint(-128, 128, (BLOCKS, 2 * PAGE), dtype=torch.int8)]


class Copies:
    def __init__(self, tensors: list[Any], groups: list[list[tuple[int, int]]], per_chunk: int) -> None:
        """`groups`: of each layer, the number of its tensor and the bytes that are in use of its page."""
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        from tiercache.integrations.vllm_offloading.cpu_spec import HostCopies

        row = sum(tensor.shape[1] for tensor in tensors) * per_chunk
        self.region = SharedOffloadRegion(uuid.uuid4().hex, CHUNKS, 0, row, row)
        refs = [[CanonicalKVCacheRef(number, used) for number, used in group] for group in groups]
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors], refs)
        self.copies = HostCopies(caches, per_chunk, self.region)
        self._number = 0

    def move(self, kind: str, blocks: list[int], chunks: list[int], sizes: list[int], indices: list[int]) -> Any:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        self._number += 1
        engine, rows = GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(chunks)
        if kind == "store":
            assert self.copies.submit_store(self._number, engine, rows)
        else:
            assert self.copies.submit_load(self._number, rows, engine)
        self.copies.wait({self._number})
        (ended,) = self.copies.get_finished()
        assert (ended.job_id, ended.success) == (self._number, True)
        return ended


@pytest.fixture
def made() -> Iterator[list[Copies]]:
    made: list[Copies] = []
    yield made
    for one in made:
        one.copies.shutdown()


def test_blocks_come_back_into_other_blocks(tensors: list[Any], made: list[Copies]) -> None:
    made.append(copies := Copies(tensors, [[(0, PAGE), (1, PAGE), (2, 2 * PAGE)]], 1))
    before = [tensor.clone() for tensor in tensors]
    stored = copies.move("store", [1, 4], [3, 0], [2], [0])
    assert stored.transfer_size == 2 * 4 * PAGE
    for tensor in tensors:
        tensor.zero_()
    copies.move("load", [0, 5], [3, 0], [2], [0])
    for tensor, old in zip(tensors, before, strict=True):
        assert tensor[0].equal(old[1]) and tensor[5].equal(old[4])
        assert not tensor[1:5].any()


def test_a_prefix_may_begin_in_the_middle_of_a_chunk(tensors: list[Any], made: list[Copies]) -> None:
    """Two blocks a chunk; the load needs the second block of the first one, and both of the next."""
    made.append(copies := Copies(tensors, [[(0, PAGE), (1, PAGE), (2, 2 * PAGE)]], 2))
    before = [tensor.clone() for tensor in tensors]
    copies.move("store", [0, 1, 2, 3], [2, 1], [4], [0])
    for tensor in tensors:
        tensor.zero_()
    copies.move("load", [1, 4, 5], [2, 1], [3], [1])
    for tensor, old in zip(tensors, before, strict=True):
        assert tensor[1].equal(old[1]) and tensor[4].equal(old[2]) and tensor[5].equal(old[3])
        assert not tensor[0].any() and not tensor[2:4].any()


def test_groups_have_rows_of_their_own(tensors: list[Any], made: list[Copies]) -> None:
    """A window's group begins at another block than the one of layers that see every token, and one may have nothing."""
    made.append(copies := Copies(tensors, [[(0, PAGE), (1, PAGE)], [(2, PAGE)], [(0, PAGE)]], 1))
    before = [tensor.clone() for tensor in tensors]
    copies.move("store", [1, 2, 5], [0, 1, 2], [2, 1, 0], [0, 1, 0])
    for tensor in tensors:
        tensor.zero_()
    copies.move("load", [3, 4, 0], [0, 1, 2], [2, 1, 0], [0, 1, 0])
    for number in (0, 1):
        assert tensors[number][3].equal(before[number][1]) and tensors[number][4].equal(before[number][2])
    assert tensors[2][0, :PAGE].equal(before[2][5, :PAGE])
    assert not tensors[2][0, PAGE:].any()
