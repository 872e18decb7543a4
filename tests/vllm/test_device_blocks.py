"""Blocks in device memory, in every order that vLLM's own allocation makes, in host memory; and what is refused."""

from __future__ import annotations

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

from tiercache.device.driver import Driver
from tiercache.errors import LayoutError
from tiercache.integrations.vllm.blocks import DeviceKvBlocks

BLOCKS, LAYERS, HEADS, TOKENS, HEAD_SIZE = 24, 3, 2, 32, 8
BLOCK_COMPACT = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
A_RUN_A_HEAD = ("LHBNC", "BHLNC")
CONTENT = 2 * HEAD_SIZE
SHAPE = (BLOCKS, HEADS, TOKENS, CONTENT)


@pytest.fixture
def driver() -> Driver:
    return Driver()


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


def blocks_of(driver: Driver, tensors: dict[str, Any], spec: Any) -> DeviceKvBlocks:
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
    chunk = kv.driver.empty(len(blocks) * kv.bytes_per_block)
    kv.kv.gather(blocks, chunk, kv.driver.make_stream())
    return chunk


def scattered(kv: DeviceKvBlocks, chunk: Any, chunk_blocks: int, skip: int, blocks: list[int]) -> None:
    kv.kv.scatter(chunk, chunk_blocks, skip, blocks, kv.driver.make_stream())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("layout", "split"),
    [(layout, 1) for layout in (*BLOCK_COMPACT, *A_RUN_A_HEAD)] + [("LBNHC", 2), ("LBHNC", 2), ("LBHNC", 4)],
)
def test_blocks_come_back_into_others_in_every_order(driver: Driver, layout: str, split: int, dtype: Any) -> None:
    spec = spec_of(dtype)
    tensors = allocated(layout, spec, split)
    kv = blocks_of(driver, tensors, spec)
    assert kv.bytes_per_block == LAYERS * spec.page_size_bytes

    old, new = [7, 3, 4, 23, 0], [20, 21, 1, 8, 2]
    expected = logical(tensors, old)
    untouched = [block for block in range(BLOCKS) if block not in new]
    before = logical(tensors, untouched)
    scattered(kv, gathered(kv, old), 5, 0, new)
    assert torch.equal(logical(tensors, new), expected)
    assert torch.equal(logical(tensors, untouched), before)

    scattered(kv, gathered(kv, old), 5, 3, [10, 11])
    assert torch.equal(logical(tensors, [10, 11]), expected[:, 3:])


def test_chunk_is_whole_blocks_one_after_the_other(driver: Driver) -> None:
    spec = spec_of()
    tensors = allocated("LBHNC", spec)
    kv = blocks_of(driver, tensors, spec)
    expected = logical(tensors, [5, 2]).transpose(0, 1).contiguous()
    assert gathered(kv, [5, 2]).numpy().tobytes() == expected.numpy().tobytes()


def test_padding_between_blocks_is_left_alone(driver: Driver) -> None:
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


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(BLOCKS, HEADS, CONTENT, TOKENS).transpose(2, 3),
        torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., :CONTENT],
        torch.zeros(TOKENS, BLOCKS, HEADS, CONTENT).permute(1, 2, 0, 3),
    ],
    ids=["tokens innermost", "padded tokens", "tokens outermost"],
)
def test_blocks_of_any_strides_come_back(driver: Driver, memory: Any) -> None:
    memory.copy_(torch.randn(memory.shape))
    tensors = {"layer.0": memory}
    kv = blocks_of(driver, tensors, spec_of(torch.float32))
    expected = memory[[7, 3, 4]].clone()
    scattered(kv, gathered(kv, [7, 3, 4]), 3, 0, [20, 1, 2])
    assert torch.equal(memory[[20, 1, 2]], expected)


def test_description_names_what_is_inside_a_block_and_not_where_it_lies(driver: Driver) -> None:
    def described(layout: str, dtype: Any = torch.bfloat16, split: int = 1) -> str:
        spec = spec_of(dtype)
        return blocks_of(driver, allocated(layout, spec, split), spec).describe()

    assert described("LBHNC") == described("BLHNC")
    assert described("LBNHC") == described("BLNHC")
    assert described("LBHNC") == described("LHBNC") == described("BHLNC"), "their blocks have the same bytes"
    others = [described("LBNHC"), described("LBHNC", torch.float16), described("LBHNC", split=2)]
    assert len({described("LBHNC"), *others}) == 4


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
        (torch.zeros(1, HEADS, TOKENS, CONTENT).expand(SHAPE), "do not overlap"),
        (torch.zeros(BLOCKS, 1, TOKENS, CONTENT).expand(SHAPE), "do not overlap"),
        (torch.zeros(BLOCKS * HEADS * TOKENS * CONTENT).as_strided(SHAPE, (512, 512, 16, 1)), "do not overlap"),
    ],
)  # fmt: skip
def test_an_unknown_arrangement_is_refused(driver: Driver, wrong: Any, found: str) -> None:
    with pytest.raises(LayoutError, match=rf"KV of layer layer\.0: .*{found}"):
        blocks_of(driver, {"layer.0": wrong}, spec_of(torch.float32))


def test_unlike_layers_are_refused(driver: Driver) -> None:
    one, other = torch.zeros(SHAPE, dtype=torch.bfloat16), torch.zeros(SHAPE, dtype=torch.float16)
    with pytest.raises(LayoutError, match=r"KV of layer layer\.1: expected .*bfloat16.* found .*float16"):
        blocks_of(driver, {"layer.0": one, "layer.1": other}, spec_of())


def test_memory_of_another_device_is_refused(driver: Driver) -> None:
    tensor = torch.zeros(SHAPE, dtype=torch.bfloat16, device="meta")
    with pytest.raises(LayoutError, match="KV of layer layer.0: KV tensor 0: expected memory of cpu"):
        DeviceKvBlocks(
            driver, {"layer.0": tensor}, blocks=BLOCKS, heads=HEADS, block_tokens=TOKENS, content_bytes=2 * CONTENT
        )


def test_no_tensors_are_refused(driver: Driver) -> None:
    with pytest.raises(LayoutError, match="no KV tensors"):
        blocks_of(driver, {}, spec_of())
