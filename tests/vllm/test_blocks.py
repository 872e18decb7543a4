"""Blocks of paged KV to contiguous chunks and back, against torch's own indexing, in host and device memory: in every order
that vLLM's allocation makes; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1 import kv_cache_interface as vllm_kv
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tiercache.device.driver import Driver
from tiercache.errors import LayoutError
from tiercache.integrations.lending import Lending, TakenBack
from tiercache.integrations.vllm.blocks import DeviceKvBlocks, KvBlocks

BLOCKS, LAYERS, HEADS, TOKENS, HEAD_SIZE = 24, 3, 2, 32, 8
CONTENT = 2 * HEAD_SIZE
SHAPE = (BLOCKS, HEADS, TOKENS, CONTENT)
Tensors = dict[str, Any]


def sizes_of(tensors: Tensors, content_bytes: int, heads: int = HEADS) -> dict[str, int]:
    content_bytes = content_bytes or (CONTENT * next(iter(tensors.values())).element_size() if tensors else 1)
    return {"blocks": BLOCKS, "heads": heads, "block_tokens": TOKENS, "content_bytes": content_bytes}


def in_host_memory(tensors: Tensors, content_bytes: int = 0, heads: int = HEADS, **more: Any) -> KvBlocks:
    return KvBlocks(tensors, **sizes_of(tensors, content_bytes, heads), **more)


def in_device_memory(tensors: Tensors, content_bytes: int = 0) -> DeviceKvBlocks:
    return DeviceKvBlocks(Driver(), tensors, **sizes_of(tensors, content_bytes))


def layers_of(whole: Any) -> Tensors:
    return {f"layer.{number}": layer for number, layer in enumerate(whole)}


def all_but(*blocks: int) -> list[int]:
    return [block for block in range(BLOCKS) if block not in blocks]


# In host memory


@pytest.fixture(params=["one storage", "unequal distances", "a storage each"])
def tensors(request: pytest.FixtureRequest) -> Tensors:
    whole = torch.randint(-100, 100, (LAYERS + 1, *SHAPE)).to(torch.bfloat16)
    if request.param == "unequal distances":
        return layers_of([whole[0], whole[1], whole[3]])
    return layers_of(whole[:LAYERS] if request.param == "one storage" else [layer.clone() for layer in whole[:LAYERS]])


def reference(tensors: Tensors, blocks: list[int]) -> np.ndarray:
    """(layers, blocks, bytes of a block), by torch's own indexing."""
    chosen = torch.stack([tensor[torch.tensor(blocks)] for tensor in tensors.values()])
    return np.asarray(chosen.contiguous().view(torch.uint8).numpy().reshape(-1))


def gathered(kv: KvBlocks, blocks: list[int]) -> np.ndarray:
    payload = np.zeros(len(blocks) * kv.bytes_per_block, np.uint8)
    kv.gather(blocks, payload)
    return payload


@pytest.mark.parametrize("blocks", [[3], [4, 5, 6, 7], [23, 0], [7, 3, 4, 5, 20, 1]])
def test_gather_and_scatter_are_torchs_indexing(tensors: Tensors, blocks: list[int]) -> None:
    kv = in_host_memory(tensors)
    expected, before = reference(tensors, blocks), reference(tensors, all_but(*blocks))
    payload = gathered(kv, blocks)
    assert np.array_equal(payload, expected)
    for tensor in tensors.values():
        tensor[torch.tensor(blocks)] = 0
    kv.scatter(payload, len(blocks), 0, blocks)
    assert np.array_equal(reference(tensors, blocks), expected)
    assert np.array_equal(reference(tensors, all_but(*blocks)), before)


def test_part_of_a_chunk_is_scattered_and_a_payload_of_another_length_is_refused(tensors: Tensors) -> None:
    kv = in_host_memory(tensors)
    kv.scatter(gathered(kv, [1, 2, 3, 4]), 4, 1, [10, 20])
    assert np.array_equal(reference(tensors, [10, 20]), reference(tensors, [2, 3]))
    with pytest.raises(LayoutError, match=r"expected .* bytes, found 7"):
        kv.scatter(np.zeros(7, np.uint8), 1, 0, [0])


@pytest.mark.parametrize("together", [True, False], ids=["one storage", "a storage each"])
def test_parts_of_the_heads_are_the_same_bytes_whatever_rank_has_them(together: bool) -> None:
    """Four heads of one rank, in parts of two, and two ranks with two heads each."""
    full = torch.randint(-100, 100, (LAYERS, BLOCKS, 2 * HEADS, TOKENS, CONTENT)).to(torch.bfloat16)
    alone = layers_of(full if together else [layer.clone() for layer in full])
    for part in range(2):
        heads = slice(part * HEADS, (part + 1) * HEADS)
        views = {name: tensor[:, heads] for name, tensor in alone.items()}
        ranks = {name: tensor[:, heads].contiguous() for name, tensor in alone.items()}
        of_views, of_rank = in_host_memory(views, part=True), in_host_memory(ranks, part=True)
        assert of_views.describe() == of_rank.describe() and of_views.bytes_per_block == of_rank.bytes_per_block
        payload = gathered(of_rank, [4, 5, 20])
        assert np.array_equal(gathered(of_views, [4, 5, 20]), payload)
        assert np.array_equal(payload, reference(ranks, [4, 5, 20]))
        before = {name: tensor.clone() for name, tensor in alone.items()}
        of_views.scatter(payload, 3, 0, [7, 8, 9])
        others, rest = all_but(7, 8, 9), slice((1 - part) * HEADS, (2 - part) * HEADS)
        for name, tensor in alone.items():
            assert torch.equal(tensor[7:10, heads], before[name][[4, 5, 20], heads])
            assert torch.equal(tensor[others], before[name][others])
            assert torch.equal(tensor[:, rest], before[name][:, rest]), "another part was touched"


def test_recurrent_states_move_without_the_room_behind_them() -> None:
    """Of 100 bytes each, 128 from one block to the next, as vLLM views the state of a recurrent layer."""
    whole = torch.randint(-100, 100, (LAYERS, BLOCKS, 1, 1, 128), dtype=torch.int8)
    tensors = layers_of(whole[..., :100])
    kv = in_host_memory(tensors, 100, heads=1, states=True)
    assert (kv.bytes_per_block, kv.bytes_per_token) == (300, 10)
    payload, before = gathered(kv, [3, 20]), whole.clone()
    assert np.array_equal(payload, reference(tensors, [3, 20]))
    kv.scatter(payload, 2, 0, [7, 8])
    assert torch.equal(whole[:, [7, 8], ..., :100], before[:, [3, 20], ..., :100])
    assert torch.equal(whole[:, all_but(7, 8)], before[:, all_but(7, 8)])
    assert torch.equal(whole[..., 100:], before[..., 100:])
    overlapping = torch.zeros(4000, dtype=torch.int8).as_strided((BLOCKS, 1, 1, 100), (64, 100, 100, 1))
    with pytest.raises(LayoutError, match="expected 24 dense blocks"):
        in_host_memory({"layer.0": overlapping}, 100, heads=1, states=True)


def test_mlas_latents_are_blocks_of_one_head() -> None:
    """As vLLM 0.32 has them: tokens before heads in memory, which is all the same with one head."""
    strides = (TOKENS * 36, 36, 36, 1)
    latent = layers_of(torch.randn(BLOCKS * TOKENS * 36).as_strided((BLOCKS, 1, TOKENS, 36), strides) for _ in range(2))
    kv = in_host_memory(latent, 4 * 36, heads=1)
    payload = gathered(kv, [7, 2, 3])
    assert np.array_equal(payload, reference(latent, [7, 2, 3]))
    kv.scatter(payload, 3, 1, [20, 21])
    assert np.array_equal(reference(latent, [20, 21]), reference(latent, [2, 3]))


# In device memory


def spec_of(dtype: Any = torch.bfloat16, **more: Any) -> Any:
    return vllm_kv.FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=dtype, **more)


def allocated(layout: str, spec: Any, split: int = 1) -> Tensors:
    """What vLLM hands to `register_kv_caches`, with random bytes in it."""
    names = [f"layer.{number}" for number in range(LAYERS)]
    order = KVCacheLayout[layout]
    layer_stride, block_stride, *_ = vllm_kv.compute_layout_strides(spec, BLOCKS, LAYERS, order)
    size = spec.page_size_bytes * BLOCKS * LAYERS
    tensor = vllm_kv.KVCacheTensor(size=size, layers=names, layer_stride=layer_stride, block_stride=block_stride)
    config = vllm_kv.KVCacheConfig(BLOCKS, [tensor], [vllm_kv.KVCacheGroupSpec(names, spec)])
    tensors: Tensors = allocate_kv_cache(config, torch.device("cpu"), order, [spec.block_size // split])
    memory = memory_of(tensors)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    return tensors


def memory_of(tensors: Tensors) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(tensors["layer.0"].untyped_storage())


def logical(tensors: Tensors, blocks: list[int]) -> Any:
    """(layers, blocks, parts of a block, heads, tokens, bytes) as the engine reads it, by torch's own indexing."""
    whole = [tensor.view(torch.uint8).unflatten(0, (BLOCKS, -1)) for tensor in tensors.values()]
    return torch.stack([layer[torch.tensor(blocks)] for layer in whole])


def chunk_of(kv: DeviceKvBlocks, blocks: list[int]) -> Any:
    chunk = kv.driver.empty(len(blocks) * kv.bytes_per_block)
    kv.kv.gather(blocks, chunk, kv.driver.make_stream())
    return chunk


def scattered(kv: DeviceKvBlocks, chunk: Any, chunk_blocks: int, skip: int, blocks: list[int]) -> None:
    kv.kv.scatter(chunk, chunk_blocks, skip, blocks, kv.driver.make_stream())


@pytest.mark.parametrize(
    ("layout", "split", "dtype"),
    [(layout, 1, torch.bfloat16) for layout in ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")]
    + [("LBNHC", 2, torch.bfloat16), ("LBHNC", 2, torch.bfloat16), ("LBHNC", 4, torch.bfloat16)]
    + [("LBNHC", 1, dtype) for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float32)],
    ids=str,
)
def test_blocks_of_a_device_come_back_into_others_in_every_order(layout: str, split: int, dtype: Any) -> None:
    spec = spec_of(dtype)
    tensors = allocated(layout, spec, split)
    kv = in_device_memory(tensors, spec.state_content_size_bytes)
    assert kv.bytes_per_block == LAYERS * spec.page_size_bytes

    old, new = [7, 3, 4, 23, 0], [20, 21, 1, 8, 2]
    expected, before = logical(tensors, old), logical(tensors, all_but(*new))
    scattered(kv, chunk_of(kv, old), 5, 0, new)
    assert torch.equal(logical(tensors, new), expected)
    assert torch.equal(logical(tensors, all_but(*new)), before)

    scattered(kv, chunk_of(kv, old), 5, 3, [10, 11])
    assert torch.equal(logical(tensors, [10, 11]), expected[:, 3:])


def test_padding_between_blocks_is_left_alone() -> None:
    spec = spec_of(page_size_padded=spec_of().page_size_bytes + 512)
    tensors = allocated("LBNHC", spec)
    kv = in_device_memory(tensors)
    assert kv.bytes_per_block == LAYERS * spec.unpadded_page_size_bytes
    padding = memory_of(tensors).view(LAYERS, BLOCKS, spec.page_size_bytes)[:, :, spec.unpadded_page_size_bytes :]
    before, expected = padding.clone(), logical(tensors, [1, 2])
    scattered(kv, chunk_of(kv, [1, 2]), 2, 0, [4, 3])
    assert torch.equal(logical(tensors, [4, 3]), expected)
    assert torch.equal(padding, before)


def test_description_names_what_is_inside_a_block_and_not_where_it_lies() -> None:
    def described(layout: str, dtype: Any = torch.bfloat16, split: int = 1) -> str:
        spec = spec_of(dtype)
        return in_device_memory(allocated(layout, spec, split), spec.state_content_size_bytes).describe()

    assert described("LBNHC") == described("BLNHC")
    alike = {described(layout) for layout in ("LBHNC", "BLHNC", "LHBNC", "BHLNC")}
    assert len(alike) == 1, "their blocks have the same bytes"
    others = {described("LBNHC"), described("LBHNC", torch.float16), described("LBHNC", split=2)}
    assert len(alike | others) == 4


# Taking blocks back


def test_no_copy_begins_after_blocks_were_taken_back() -> None:
    lending = Lending()
    assert lending.take_back(0.0)
    with pytest.raises(TakenBack), lending:
        pytest.fail("the copy ran")


# What is refused


@pytest.mark.parametrize("blocks_of", [in_host_memory, in_device_memory])
def test_unlike_layers_and_no_layers_are_refused(blocks_of: Callable[..., Any]) -> None:
    one, other = torch.zeros(SHAPE, dtype=torch.bfloat16), torch.zeros(SHAPE, dtype=torch.float16)
    with pytest.raises(LayoutError, match=r"KV of layer layer\.1: expected .*bfloat16.* found .*float16"):
        blocks_of({"layer.0": one, "layer.1": other})
    with pytest.raises(LayoutError, match="no KV tensors"):
        blocks_of({})


@pytest.mark.parametrize(
    ("blocks_of", "wrong", "found"),
    [
        *(
            (blocks_of, wrong, found)
            for blocks_of in (in_host_memory, in_device_memory)
            for wrong, found in [
                (torch.zeros(2, BLOCKS, TOKENS, HEADS, HEAD_SIZE), r"found \(2, 24, 32, 2, 8\)"),
                (torch.zeros(BLOCKS, TOKENS, HEAD_SIZE), r"found \(24, 32, 8\)"),
                (torch.zeros(BLOCKS, TOKENS, HEADS, CONTENT), r"found \(24, 32, 2, 16\)"),
                (torch.zeros(BLOCKS, HEADS, TOKENS, HEAD_SIZE), r"found \(24, 2, 32, 8\)"),
                (torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT), r"found \(25, 2, 32, 16\)"),
                (torch.zeros(3 * BLOCKS, HEADS, TOKENS // 3, CONTENT), r"found \(72, 2, 10, 16\)"),
                (torch.zeros(0, HEADS, TOKENS, CONTENT), r"found \(0, 2, 32, 16\)"),
                (torch.zeros(SHAPE, dtype=torch.bfloat16), "64 bytes, .*found .* of 2 bytes"),
            ]
        ),
        (in_host_memory, torch.zeros(BLOCKS, TOKENS, HEADS, CONTENT).transpose(1, 2), "expected 24 dense blocks"),
        (in_host_memory, torch.zeros(BLOCKS, LAYERS, HEADS, TOKENS, CONTENT)[:, 0], "expected 24 dense blocks"),
        (in_host_memory, torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT), "24 dense blocks .* found 48"),
        (in_device_memory, torch.zeros(1, HEADS, TOKENS, CONTENT).expand(SHAPE), "do not overlap"),
        (in_device_memory, torch.zeros(BLOCKS, 1, TOKENS, CONTENT).expand(SHAPE), "do not overlap"),
        (in_device_memory, torch.zeros(24576).as_strided(SHAPE, (512, 512, 16, 1)), "do not overlap"),
        (in_device_memory, torch.zeros(SHAPE, device="meta"), "KV tensor 0: expected memory of cpu"),
    ],
)
def test_an_unknown_shape_or_arrangement_is_refused(blocks_of: Callable[..., Any], wrong: Any, found: str) -> None:
    with pytest.raises(LayoutError, match=rf"KV of layer layer\.0: .*{found}"):
        blocks_of({"layer.0": wrong}, 4 * CONTENT)
