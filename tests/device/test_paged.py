"""Blocks of paged KV into contiguous chunks and back: every byte of the named blocks, and no other."""

from typing import Any

import pytest
import torch

from tiercache.device.driver import Driver, bytes_of
from tiercache.device.paged import PagedChunk, PagedKv, device_payload
from tiercache.errors import LayoutError

BLOCKS = 13
DRIVER = Driver()


def planes_of(*shape: int, dtype: Any = torch.bfloat16) -> list[Any]:
    """K and V of three layers in allocations of their own, random in every bit."""
    size = torch.Size(shape).numel() * 2 * torch.empty(0, dtype=dtype).element_size()
    layers = [torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(2, *shape) for _ in range(3)]
    return [plane for layer in layers for plane in layer]


def gathered(kv: PagedKv, blocks: list[int]) -> Any:
    chunk = DRIVER.empty(len(blocks) * kv.block_bytes)
    kv.gather(blocks, chunk, DRIVER.make_stream())
    return chunk


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 8, 128), (3, 5, 7), (1,), (64, 656)])
def test_chunk_is_block_by_block_each_with_its_planes(shape: tuple[int, ...], dtype: Any) -> None:
    planes = planes_of(BLOCKS, *shape, dtype=dtype)
    kv = PagedKv(DRIVER, planes)
    expected = torch.cat([bytes_of(plane[block].contiguous()) for block in (3, 0, 12) for plane in planes])
    assert torch.equal(gathered(kv, [3, 0, 12]), expected)
    assert kv.block_bytes * 3 == len(expected)


def test_scatter_touches_the_named_blocks_alone() -> None:
    old, new = planes_of(BLOCKS, 4, 8), planes_of(BLOCKS, 4, 8)
    before = [plane.clone() for plane in new]
    kv = PagedKv(DRIVER, new)
    kv.scatter(gathered(PagedKv(DRIVER, old), [5, 2, 7]), 3, 1, [9, 4], DRIVER.make_stream())
    for source, plane, was in zip(old, new, before, strict=True):
        assert torch.equal(plane[[9, 4]].view(torch.int16), source[[2, 7]].view(torch.int16))
        others = [block for block in range(BLOCKS) if block not in (9, 4)]
        assert torch.equal(plane[others].view(torch.int16), was[others].view(torch.int16))


def test_warming_up_changes_nothing() -> None:
    planes = planes_of(BLOCKS, 4, 8)
    before = [plane.clone() for plane in planes]
    PagedKv(DRIVER, planes).warm_up()
    for plane, was in zip(planes, before, strict=True):
        assert torch.equal(plane.view(torch.int16), was.view(torch.int16))


def test_inference_tensors_are_scattered_to() -> None:
    with torch.inference_mode():
        plane = torch.zeros(BLOCKS, 4, 8)
        kv = PagedKv(DRIVER, [plane])
    chunk = DRIVER.empty(2 * kv.block_bytes).fill_(7)
    kv.scatter(chunk, 2, 0, [1, 3], DRIVER.make_stream())
    assert bool((plane[[1, 3]].clone().view(torch.uint8) == 7).all()) and not plane[[0, 2]].any()


@pytest.mark.parametrize(
    ("blocks", "chunk_blocks", "skip", "found"),
    [
        ([0, BLOCKS], 2, 0, r"expected ids in 0..12, found 0..13"),
        ([-1], 1, 0, r"expected ids in 0..12, found -1"),
        ([1, 1], 2, 0, "expected each id once"),
        ([1, 2], 3, 2, "2 blocks at 2 do not lie inside a chunk of 3"),
        ([], 1, 0, "0 blocks at 0"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(blocks: list[int], chunk_blocks: int, skip: int, found: str) -> None:
    kv = PagedKv(DRIVER, planes_of(BLOCKS, 4))
    with pytest.raises(LayoutError, match=found):
        kv.scatter(DRIVER.empty(chunk_blocks * kv.block_bytes), chunk_blocks, skip, blocks, DRIVER.make_stream())


def test_a_chunk_of_another_length_is_refused() -> None:
    kv = PagedKv(DRIVER, planes_of(BLOCKS, 4))
    with pytest.raises(LayoutError, match="expected 96 bytes for 2 blocks, found 95"):
        kv.gather([1, 2], DRIVER.empty(95), DRIVER.make_stream())


def test_description_is_of_what_is_inside_a_block() -> None:
    def described(*shape: int, dtype: Any = torch.bfloat16) -> str:
        return PagedKv(DRIVER, planes_of(*shape, dtype=dtype)).describe()

    assert described(BLOCKS, 4, 8) == described(2 * BLOCKS, 4, 8)
    different = {described(BLOCKS, 4, 8), described(BLOCKS, 8, 4), described(BLOCKS, 4, 8, dtype=torch.float16)}
    assert len(different) == 3


def test_a_part_of_a_chunk_is_not_stored() -> None:
    kv = PagedKv(DRIVER, planes_of(BLOCKS, 4))
    part = PagedChunk(kv, [1], chunk_blocks=4, skip=3)
    assert part.payload_bytes == 4 * kv.block_bytes
    with pytest.raises(LayoutError, match="can be loaded, not stored"):
        part.gather(DRIVER.empty(part.payload_bytes), DRIVER.make_stream())


def test_a_tensor_of_any_dtype_is_a_payload() -> None:
    for dtype in (torch.bool, torch.complex64, torch.float8_e5m2, torch.int64):
        tensor = torch.zeros(6, dtype=dtype)[1:4]
        payload = device_payload(DRIVER, tensor)
        assert payload is not None and payload.payload_bytes == 3 * tensor.element_size()
    assert device_payload(DRIVER, b"bytes") is None
    assert device_payload(DRIVER, torch.zeros(2, device="meta")) is None
