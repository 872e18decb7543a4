"""Blocks in device memory, in every order that vLLM's own allocation makes, on the CPU twin; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tiercache.device.driver import Span
from tiercache.device.twin import TwinDriver
from tiercache.errors import LayoutError
from tiercache.integrations.vllm.device_blocks import DeviceKvBlocks

BLOCKS, LAYERS, HEADS, TOKENS, HEAD_SIZE = 24, 3, 2, 32, 8
BLOCK_COMPACT = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
A_RUN_A_HEAD = ("LHBNC", "BHLNC")


@pytest.fixture
def driver() -> Iterator[TwinDriver]:
    driver = TwinDriver(64 << 20)
    yield driver
    driver.close()


def spec_of(dtype: Any = torch.bfloat16, **more: Any) -> Any:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=dtype, **more)


def allocated(layout: str, spec: Any, split: int = 1, layers: int = LAYERS) -> dict[str, Any]:
    """What vLLM hands to `register_kv_caches`, with random bytes in it."""
    names = [f"layer.{number}" for number in range(layers)]
    order = KVCacheLayout[layout]
    layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, layers, order)
    size = spec.page_size_bytes * BLOCKS * layers
    tensor = KVCacheTensor(size=size, layers=names, layer_stride=layer_stride, block_stride=block_stride)
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)])
    tensors: dict[str, Any] = allocate_kv_cache(config, torch.device("cpu"), order, [spec.block_size // split])
    memory = torch.empty(0, dtype=torch.uint8).set_(tensors[names[0]].untyped_storage())
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    return tensors


def blocks_of(driver: TwinDriver, tensors: dict[str, Any], spec: Any) -> DeviceKvBlocks:
    for tensor in tensors.values():
        driver.adopt(Span(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()))
    return DeviceKvBlocks(
        driver,
        tensors,
        blocks=BLOCKS,
        heads=spec.num_heads,
        block_tokens=spec.block_size,
        content_bytes=spec.state_content_size_bytes,
    )


def logical(tensors: dict[str, Any], blocks: list[int]) -> Any:
    """(layers, blocks, parts of a block, heads, tokens, bytes) as the engine reads it, by torch's own indexing."""
    whole = [tensor.view(torch.uint8).unflatten(0, (BLOCKS, -1)) for tensor in tensors.values()]
    return torch.stack([layer[torch.tensor(blocks)] for layer in whole])


def gathered(kv: DeviceKvBlocks, blocks: list[int]) -> Any:
    driver = kv.driver
    chunk = driver.allocate(len(blocks) * kv.bytes_per_block)
    stream = driver.make_stream()
    kv.kv.gather(blocks, 0, len(blocks), chunk, stream)
    driver.synchronize(driver.record(stream))
    return chunk


def scattered(kv: DeviceKvBlocks, chunk: Any, chunk_blocks: int, skip: int, blocks: list[int]) -> None:
    stream = kv.driver.make_stream()
    kv.kv.scatter(chunk, chunk_blocks, skip, blocks, 0, len(blocks), stream)
    kv.driver.synchronize(kv.driver.record(stream))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("layout", "split"),
    [(layout, 1) for layout in (*BLOCK_COMPACT, *A_RUN_A_HEAD)] + [("LBNHC", 2), ("LBHNC", 2), ("LBHNC", 4)],
)
def test_blocks_come_back_into_others_in_every_order(driver: TwinDriver, layout: str, split: int, dtype: Any) -> None:
    spec = spec_of(dtype)
    tensors = allocated(layout, spec, split)
    kv = blocks_of(driver, tensors, spec)
    assert kv.bytes_per_block == LAYERS * spec.page_size_bytes
    assert len(kv.kv.planes) == LAYERS * (HEADS if layout in A_RUN_A_HEAD else 1)

    old, new = [7, 3, 4, 23, 0], [20, 21, 1, 8, 2]
    expected = logical(tensors, old)
    untouched = [block for block in range(BLOCKS) if block not in new]
    before = logical(tensors, untouched)
    scattered(kv, gathered(kv, old), 5, 0, new)
    assert torch.equal(logical(tensors, new), expected)
    assert torch.equal(logical(tensors, untouched), before)

    scattered(kv, gathered(kv, old), 5, 3, [10, 11])
    assert torch.equal(logical(tensors, [10, 11]), expected[:, 3:])


def test_chunk_is_planes_of_whole_blocks(driver: TwinDriver) -> None:
    spec = spec_of()
    tensors = allocated("LBHNC", spec)
    kv = blocks_of(driver, tensors, spec)
    chunk = driver.view(gathered(kv, [5, 2]))
    assert chunk.tobytes() == logical(tensors, [5, 2]).numpy().tobytes()


def test_padding_between_blocks_is_left_alone(driver: TwinDriver) -> None:
    spec = spec_of(page_size_padded=spec_of().page_size_bytes + 512)
    tensors = allocated("LBNHC", spec)
    kv = blocks_of(driver, tensors, spec)
    assert kv.bytes_per_block == LAYERS * spec.unpadded_page_size_bytes
    memory = torch.empty(0, dtype=torch.uint8).set_(tensors["layer.0"].untyped_storage())
    pages = memory.view(LAYERS, BLOCKS, spec.page_size_bytes)
    padding = pages[:, :, spec.unpadded_page_size_bytes :].clone()
    expected = logical(tensors, [1, 2])
    scattered(kv, gathered(kv, [1, 2]), 2, 0, [4, 3])
    assert torch.equal(logical(tensors, [4, 3]), expected)
    assert torch.equal(pages[:, :, spec.unpadded_page_size_bytes :], padding)


def test_one_head_is_one_run_in_every_order(driver: TwinDriver) -> None:
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float16)
    for layout in KVCacheLayout:
        assert len(blocks_of(driver, allocated(layout.name, spec), spec).kv.planes) == LAYERS


def test_description_names_what_is_inside_a_block_and_not_where_it_lies(driver: TwinDriver) -> None:
    def described(layout: str, dtype: Any = torch.bfloat16, split: int = 1) -> str:
        spec = spec_of(dtype)
        return blocks_of(driver, allocated(layout, spec, split), spec).describe()

    assert described("LBHNC") == described("BLHNC")
    assert described("LBNHC") == described("BLNHC")
    others = [described("LBNHC"), described("LHBNC"), described("LBHNC", torch.float16), described("LBHNC", split=2)]
    assert len({described("LBHNC"), *others}) == 5


CONTENT = 2 * HEAD_SIZE
SHAPE = (BLOCKS, HEADS, TOKENS, CONTENT)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (torch.zeros(2, BLOCKS, TOKENS, HEADS, HEAD_SIZE), r"expected shape .*found \(2, 24, 32, 2, 8\)"),
        (torch.zeros(BLOCKS, TOKENS, HEAD_SIZE), r"expected shape .*found \(24, 32, 8\)"),
        (torch.zeros(BLOCKS, TOKENS, HEADS, CONTENT), r"expected shape .*found \(24, 32, 2, 16\)"),
        (torch.zeros(BLOCKS, HEADS, TOKENS, HEAD_SIZE), r"expected shape .*found \(24, 2, 32, 8\)"),
        (torch.zeros(SHAPE, dtype=torch.bfloat16), "expected shape .* 64 bytes, .*found .* of 2 bytes"),
        (torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT), r"expected shape .*found \(25, 2, 32, 16\)"),
        (torch.zeros(3 * BLOCKS, HEADS, TOKENS // 3, CONTENT), r"expected shape .*found \(72, 2, 10, 16\)"),
        (torch.zeros(0, HEADS, TOKENS, CONTENT), r"expected shape .*found \(0, 2, 32, 16\)"),
        (torch.zeros(BLOCKS, HEADS, CONTENT, TOKENS).transpose(2, 3), "one run of bytes each .*found shape"),
        (torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., :CONTENT], "one run of bytes each"),
        (torch.zeros(TOKENS, BLOCKS, HEADS, CONTENT).permute(1, 2, 0, 3), "one run of bytes each"),
        (torch.zeros(1, HEADS, TOKENS, CONTENT).expand(SHAPE), "do not overlap"),
        (torch.zeros(BLOCKS, 1, TOKENS, CONTENT).expand(SHAPE), "do not overlap"),
        (torch.zeros(BLOCKS * HEADS * TOKENS * CONTENT).as_strided(SHAPE, (512, 512, 16, 1)), "do not overlap"),
    ],
)  # fmt: skip
def test_an_unknown_arrangement_is_refused(driver: TwinDriver, wrong: Any, found: str) -> None:
    with pytest.raises(LayoutError, match=rf"KV of layer layer\.0: .*{found}"):
        blocks_of(driver, {"layer.0": wrong}, spec_of(torch.float32))


def test_unlike_layers_are_refused(driver: TwinDriver) -> None:
    one, other = torch.zeros(SHAPE, dtype=torch.bfloat16), torch.zeros(SHAPE, dtype=torch.float16)
    with pytest.raises(LayoutError, match=r"KV of layer layer\.1: expected .*bfloat16.* found .*float16"):
        blocks_of(driver, {"layer.0": one, "layer.1": other}, spec_of())


def test_memory_of_another_device_is_refused(driver: TwinDriver) -> None:
    tensor = torch.zeros(SHAPE, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="expected memory of twin, found device cpu"):
        DeviceKvBlocks(
            driver, {"layer.0": tensor}, blocks=BLOCKS, heads=HEADS, block_tokens=TOKENS, content_bytes=2 * CONTENT
        )


def test_no_tensors_are_refused(driver: TwinDriver) -> None:
    with pytest.raises(LayoutError, match="no KV tensors"):
        blocks_of(driver, {}, spec_of())
