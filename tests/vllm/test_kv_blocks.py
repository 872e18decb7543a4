"""Blocks of paged KV to contiguous chunks and back, against plain torch indexing; and which layouts are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tiercache.errors import LayoutError
from tiercache.integrations.vllm.blocks import KvBlocks

BLOCKS, HEADS, TOKENS, HEAD_SIZE, LAYERS = 24, 2, 16, 8, 5
SHAPE = (BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE)


def kv_of(tensors: dict[str, Any]) -> KvBlocks:
    content_bytes = 2 * HEAD_SIZE * next(iter(tensors.values())).element_size() if tensors else 1
    return KvBlocks(tensors, blocks=BLOCKS, heads=HEADS, block_tokens=TOKENS, content_bytes=content_bytes)


@pytest.fixture(params=["one storage", "a storage each"])
def tensors(request: pytest.FixtureRequest) -> dict[str, Any]:
    whole = torch.randint(-100, 100, (LAYERS, *SHAPE)).to(torch.bfloat16)
    together = request.param == "one storage"
    return {f"layer.{number}": whole[number] if together else whole[number].clone() for number in range(LAYERS)}


def reference(tensors: dict[str, Any], blocks: list[int]) -> np.ndarray:
    """(layers, blocks, bytes of a block), by torch's own indexing."""
    chosen = torch.stack([tensor[torch.tensor(blocks)] for tensor in tensors.values()])
    return np.asarray(chosen.contiguous().view(torch.uint8).numpy().reshape(-1))


@pytest.mark.parametrize("whole", ["one storage", "a storage each"])
def test_parts_of_the_heads_are_the_same_bytes_whatever_rank_has_them(whole: str) -> None:
    """Four heads of one rank, in parts of two, and two ranks with two heads each."""
    full = torch.randint(-100, 100, (LAYERS, BLOCKS, 2 * HEADS, TOKENS, 2 * HEAD_SIZE)).to(torch.bfloat16)
    alone = {f"layer.{number}": full[number] if whole == "one storage" else full[number].clone() for number in range(LAYERS)}
    for part in range(2):
        heads = slice(part * HEADS, (part + 1) * HEADS)
        views = {name: tensor[:, heads] for name, tensor in alone.items()}
        ranks = {name: tensor[:, heads].contiguous() for name, tensor in alone.items()}
        sizes = {"blocks": BLOCKS, "heads": HEADS, "block_tokens": TOKENS, "content_bytes": 4 * HEAD_SIZE, "part": True}
        of_views, of_rank = KvBlocks(views, **sizes), KvBlocks(ranks, **sizes)
        assert of_views.describe() == of_rank.describe() and of_views.bytes_per_block == of_rank.bytes_per_block
        payloads = [np.zeros(3 * of_rank.bytes_per_block, np.uint8) for _ in range(2)]
        for kv, payload in zip((of_views, of_rank), payloads, strict=True):
            kv.gather([4, 5, 20], payload)
        assert np.array_equal(*payloads) and np.array_equal(payloads[0], reference(ranks, [4, 5, 20]))
        before = {name: tensor.clone() for name, tensor in alone.items()}
        of_views.scatter(payloads[1], 3, 0, [7, 8, 9])
        others = [block for block in range(BLOCKS) if block not in (7, 8, 9)]
        rest = slice((1 - part) * HEADS, (2 - part) * HEADS)
        for name, tensor in alone.items():
            assert torch.equal(tensor[7:10, heads], before[name][[4, 5, 20], heads])
            assert torch.equal(tensor[others], before[name][others])
            assert torch.equal(tensor[:, rest], before[name][:, rest]), "another part was touched"


def states(stride: int) -> dict[str, Any]:
    """Of 100 bytes each, so far from one block to the next, as vLLM views the state of a recurrent layer."""
    whole = torch.randint(-100, 100, (LAYERS, BLOCKS, 1, 1, stride), dtype=torch.int8)
    return {f"layer.{number}": whole[number, ..., :100] for number in range(LAYERS)}


def test_recurrent_states_move_without_the_room_behind_them() -> None:
    tensors = states(128)
    kv = KvBlocks(tensors, blocks=BLOCKS, heads=1, block_tokens=TOKENS, content_bytes=100, states=True)
    assert (kv.bytes_per_block, kv.bytes_per_token) == (500, 32)
    payload = np.zeros(2 * kv.bytes_per_block, np.uint8)
    kv.gather([3, 20], payload)
    assert np.array_equal(payload, reference(tensors, [3, 20]))
    before = [tensor.clone() for tensor in tensors.values()]
    behind = [tensor.as_strided((BLOCKS, 28), (128, 1), tensor.storage_offset() + 100) for tensor in tensors.values()]
    room = [one.clone() for one in behind]
    kv.scatter(payload, 2, 0, [7, 8])
    for tensor, old, rest, kept in zip(tensors.values(), before, behind, room, strict=True):
        assert torch.equal(tensor[7], old[3]) and torch.equal(tensor[8], old[20])
        others = [block for block in range(BLOCKS) if block not in (7, 8)]
        assert torch.equal(tensor[others], old[others]) and torch.equal(rest, kept)


def test_states_that_overlap_are_refused() -> None:
    tensors = {"layer.0": torch.zeros(4000, dtype=torch.int8).as_strided((BLOCKS, 1, 1, 100), (64, 100, 100, 1))}
    with pytest.raises(LayoutError, match="expected 24 dense blocks"):
        KvBlocks(tensors, blocks=BLOCKS, heads=1, block_tokens=TOKENS, content_bytes=100, states=True)


@pytest.mark.parametrize("blocks", [[3], [0, 1], [4, 5, 6, 7], [23, 0], [7, 3, 4, 5, 20, 1], [2, 4, 6, 8, 10]])
def test_gather_and_scatter_are_torchs_indexing(tensors: dict[str, Any], blocks: list[int]) -> None:
    kv = kv_of(tensors)
    expected = reference(tensors, blocks)
    payload = np.zeros(len(blocks) * kv.bytes_per_block, np.uint8)
    kv.gather(blocks, payload)
    assert np.array_equal(payload, expected)

    untouched = [block for block in range(BLOCKS) if block not in blocks]
    before = reference(tensors, untouched)
    for tensor in tensors.values():
        tensor[torch.tensor(blocks)] = 0
    kv.scatter(payload, len(blocks), 0, blocks)
    assert np.array_equal(reference(tensors, blocks), expected)
    assert np.array_equal(reference(tensors, untouched), before)


def test_part_of_a_chunk_is_scattered(tensors: dict[str, Any]) -> None:
    kv = kv_of(tensors)
    payload = np.zeros(4 * kv.bytes_per_block, np.uint8)
    kv.gather([1, 2, 3, 4], payload)
    kv.scatter(payload, 4, 1, [10, 20])
    assert np.array_equal(reference(tensors, [10, 20]), reference(tensors, [2, 3]))


def test_mlas_latents_are_blocks_of_one_head() -> None:
    """As vLLM 0.32 has them: tokens before heads in memory, which is all the same with one head."""
    latent = {
        f"layer.{number}": torch.randn(BLOCKS, TOKENS, 1, 36).transpose(1, 2).as_strided(
            (BLOCKS, 1, TOKENS, 36), (TOKENS * 36, 36, 36, 1)
        )
        for number in range(LAYERS)
    }
    kv = KvBlocks(latent, blocks=BLOCKS, heads=1, block_tokens=TOKENS, content_bytes=4 * 36)
    payload = np.zeros(3 * kv.bytes_per_block, np.uint8)
    kv.gather([7, 2, 3], payload)
    assert np.array_equal(payload, reference(latent, [7, 2, 3]))
    kv.scatter(payload, 3, 1, [20, 21])
    assert np.array_equal(reference(latent, [20, 21]), reference(latent, [2, 3]))


def test_a_payload_of_another_length_is_refused(tensors: dict[str, Any]) -> None:
    kv = kv_of(tensors)
    with pytest.raises(LayoutError, match=r"expected .* bytes, found 7"):
        kv.scatter(np.zeros(7, np.uint8), 1, 0, [0])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (torch.zeros(2, BLOCKS, TOKENS, HEADS, HEAD_SIZE), r"found \(2, 24, 16, 2, 8\)"),
        (torch.zeros(BLOCKS, TOKENS, HEADS, 2 * HEAD_SIZE), r"found \(24, 16, 2, 16\)"),
        (torch.zeros(BLOCKS, HEADS, TOKENS, HEAD_SIZE), r"found \(24, 2, 16, 8\)"),
        (torch.zeros(BLOCKS + 1, HEADS, TOKENS, 2 * HEAD_SIZE), r"found \(25, 2, 16, 16\)"),
        (torch.zeros(BLOCKS, TOKENS, HEADS, 2 * HEAD_SIZE).transpose(1, 2), "expected 24 dense blocks"),
        (torch.zeros(BLOCKS, LAYERS, HEADS, TOKENS, 2 * HEAD_SIZE)[:, 0], "expected 24 dense blocks"),
        (torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, 2 * HEAD_SIZE), "expected 24 dense blocks .* found 48"),
    ],
)
def test_an_unknown_arrangement_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        kv_of({"layer.0": wrong})


def test_unlike_layers_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"KV of layer layer\.1: expected .*bfloat16.* found .*float16"):
        kv_of({"layer.0": torch.zeros(SHAPE, dtype=torch.bfloat16), "layer.1": torch.zeros(SHAPE, dtype=torch.float16)})


def test_no_tensors_are_refused() -> None:
    with pytest.raises(LayoutError, match="no KV tensors"):
        kv_of({})
