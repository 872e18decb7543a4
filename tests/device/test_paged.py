"""Paged copies against plain torch indexing: every layout, dtype, word width and kind of block list."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.device.conftest import settle
from tiercache.device.driver import DeviceError, Driver, Span
from tiercache.device.paged import PagedKv
from tiercache.device.twin import TwinDriver
from tiercache.errors import LayoutError
from tiercache.testing.paged import gather_reference, scatter_reference

BLOCKS, BLOCK_TOKENS, HEADS, HEAD = 24, 16, 4, 32
SHAPES = {
    "NHD planes first": ("NHD", (2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD)),
    "NHD blocks first": ("NHD", (BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD)),
    "HND planes first": ("HND", (2, BLOCKS, HEADS, BLOCK_TOKENS, HEAD)),
    "HND blocks first": ("HND", (BLOCKS, 2, HEADS, BLOCK_TOKENS, HEAD)),
    "MLA": ("MLA", (BLOCKS, BLOCK_TOKENS, 72)),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]
BLOCK_LISTS = {
    "whole chunk, blocks in a row": ([3, 4, 5, 6], 0, 64),
    "scattered blocks, backwards too": ([17, 2, 23, 0, 9], 0, 80),
    "part of the last block": ([8, 1, 14], 0, 37),
    "from the middle of a block": ([11, 20, 5], 7, 30),
    "one token": ([22], 15, 1),
}


def sameness(tensor: Any) -> Any:
    """Bytes, so that NaN equals NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def span_of(tensor: Any) -> Span:
    return Span(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.needs("g++")), False], ids=["kernel", "copies"])
def kernel(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layers", [1, 3])
def test_gather_and_scatter_do_what_plain_indexing_does(
    driver: Driver, tensor: Callable[..., Any], kernel: bool, shape: str, dtype: Any, layers: int
) -> None:
    layout, dimensions = SHAPES[shape]
    kv = PagedKv(driver, [tensor(dimensions, dtype, seed=layer) for layer in range(layers)], layout)
    stream = driver.make_stream()
    for blocks, first_token, tokens in BLOCK_LISTS.values():
        chunk = tensor((tokens * kv.bytes_per_token,), torch.uint8, seed=99)
        kv.gather(blocks, first_token, tokens, span_of(chunk), stream, kernel=kernel)
        driver.synchronize(driver.record(stream))
        expected = gather_reference(kv, blocks, first_token, tokens)
        assert torch.equal(chunk, sameness(expected))

        before = [sameness(layer).clone() for layer in kv.tensors]
        wanted = tensor(tuple(expected.shape), dtype, seed=7)
        scatter_reference(kv, wanted, 0, blocks, first_token, tokens)
        after = [sameness(layer).clone() for layer in kv.tensors]
        for layer, memory in zip(kv.tensors, before, strict=True):
            layer.reshape(-1).view(torch.uint8).copy_(memory)
        settle(driver)
        kv.scatter(span_of(wanted), tokens, 0, blocks, first_token, tokens, stream, kernel=kernel)
        driver.synchronize(driver.record(stream))
        for layer, memory in zip(kv.tensors, after, strict=True):
            assert torch.equal(sameness(layer), memory), "the right bytes, and no others, changed"


def test_scatter_of_the_end_of_a_chunk_leaves_the_rest_alone(
    driver: Driver, tensor: Callable[..., Any], kernel: bool
) -> None:
    kv = PagedKv(driver, [tensor((2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD), seed=s) for s in range(2)], "NHD")
    chunk = tensor((4, 64, HEADS, HEAD), seed=5)
    stream = driver.make_stream()
    before = [layer.clone() for layer in kv.tensors]
    settle(driver)
    kv.scatter(span_of(chunk), 64, 48, [9], 0, 16, stream, kernel=kernel)
    driver.synchronize(driver.record(stream))
    assert torch.equal(sameness(gather_reference(kv, [9], 0, 16)), sameness(chunk[:, 48:]))
    for layer, old in zip(kv.tensors, before, strict=True):
        others = [block for block in range(BLOCKS) if block != 9]
        assert torch.equal(sameness(layer[:, others]), sameness(old[:, others]))


@pytest.mark.needs("g++")
def test_an_upload_that_the_driver_refuses_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise DeviceError("it refuses")

    driver = TwinDriver(1 << 20)
    tensor = torch.from_numpy(driver.view(driver.allocate(8192))).reshape(2, 4, 4, 1, 256)
    free_bytes, _ = driver.memory_bytes()
    monkeypatch.setattr(driver, "copy", refused)
    with pytest.raises(DeviceError, match="it refuses"):
        PagedKv(driver, [tensor], "NHD", planes_first=True)
    assert driver.memory_bytes()[0] == free_bytes
    driver.close()


def test_more_blocks_than_one_launch_takes(driver: Driver, tensor: Callable[..., Any], kernel: bool) -> None:
    blocks = 2000
    kv = PagedKv(driver, [tensor((2, blocks, 2, 1, 16), torch.float16)], "NHD")
    order = list(range(blocks - 1, -1, -1))
    chunk = tensor((3997 * kv.bytes_per_token,), torch.uint8, seed=1)
    stream = driver.make_stream()
    kv.gather(order, 3, 3997, span_of(chunk), stream, kernel=kernel)
    driver.synchronize(driver.record(stream))
    assert torch.equal(chunk, sameness(gather_reference(kv, order, 3, 3997)))


@pytest.mark.parametrize("head", [1, 3, 6, 20], ids=lambda head: f"{head} elements")
def test_rows_that_fit_no_wide_word(driver: Driver, tensor: Callable[..., Any], kernel: bool, head: int) -> None:
    kv = PagedKv(driver, [tensor((BLOCKS, 2, HEADS, BLOCK_TOKENS, head), torch.uint8)], "HND")
    chunk = tensor((50 * kv.bytes_per_token,), torch.uint8, seed=1)
    stream = driver.make_stream()
    kv.gather([3, 1, 4, 15], 5, 50, span_of(chunk), stream, kernel=kernel)
    driver.synchronize(driver.record(stream))
    assert torch.equal(chunk, sameness(gather_reference(kv, [3, 1, 4, 15], 5, 50)))


def test_chunk_format_does_not_depend_on_how_the_engine_pages_it(driver: Driver, tensor: Callable[..., Any]) -> None:
    nhd = PagedKv(driver, [tensor((2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD))], "NHD")
    hnd = PagedKv(driver, [tensor((BLOCKS, 2, HEADS, 8, HEAD))], "HND")
    assert nhd.describe() == hnd.describe()
    assert nhd.bytes_per_token == hnd.bytes_per_token == 2 * HEADS * HEAD * 2


class TestRefused:
    @pytest.fixture
    def kv(self, driver: Driver, tensor: Callable[..., Any]) -> PagedKv:
        return PagedKv(driver, [tensor((2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD))], "NHD")

    @pytest.mark.parametrize(
        ("blocks", "first_token", "tokens", "message"),
        [
            ([1, BLOCKS], 0, 32, f"blocks: expected ids in 0..{BLOCKS - 1}, found 1..{BLOCKS}"),
            ([-1], 0, 16, "found -1..-1"),
            ([1, 2], 0, 33, "2 blocks of 16 tokens cannot hold 33 tokens"),
            ([1, 2], 1, 32, "cannot hold 32 tokens from token 1 on"),
            ([1], 0, 0, "0 tokens"),
        ],
    )
    def test_blocks_that_do_not_fit(
        self, kv: PagedKv, driver: Driver, blocks: list[int], first_token: int, tokens: int, message: str
    ) -> None:
        chunk = driver.allocate(1 << 20).part(0, tokens * kv.bytes_per_token)
        with pytest.raises(LayoutError, match=message):
            kv.gather(blocks, first_token, tokens, chunk, driver.make_stream())

    def test_chunk_of_another_length(self, kv: PagedKv, driver: Driver) -> None:
        chunk = driver.allocate(1 << 20)
        with pytest.raises(LayoutError, match=r"expected \d+ bytes for 16 tokens, found 1048576"):
            kv.gather([1], 0, 16, chunk, driver.make_stream())

    def test_memory_of_another_device(self, driver: Driver) -> None:
        with pytest.raises(LayoutError, match=f"expected memory of {driver.name}, found cpu"):
            PagedKv(driver, [torch.zeros((2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD))], "NHD")

    def test_layers_of_different_kinds(self, driver: Driver, tensor: Callable[..., Any]) -> None:
        layers = [tensor((2, BLOCKS, 16, 4, 32)), tensor((2, BLOCKS, 16, 4, 64))]
        with pytest.raises(LayoutError, match="KV of layer 1: expected shape, strides and dtype of layer 0"):
            PagedKv(driver, layers, "NHD")

    def test_shape_that_does_not_say_where_k_and_v_are(self, driver: Driver, tensor: Callable[..., Any]) -> None:
        layer = tensor((2, 2, 16, 4, 32))
        with pytest.raises(LayoutError, match="give planes_first"):
            PagedKv(driver, [layer], "NHD")
        assert len(PagedKv(driver, [layer], "NHD", planes_first=False).planes) == 2

    @pytest.mark.parametrize(
        ("layout", "shape", "message"),
        [
            ("XYZ", (2, 4, 16, 4, 32), "expected one of NHD, HND, MLA, found 'XYZ'"),
            ("NHD", (4, 16, 4, 32), "expected five dimensions"),
            ("NHD", (3, 4, 16, 4, 32), "does not say where K and V are"),
            ("MLA", (4, 16, 4, 32), "expected .blocks, block_tokens, latent_size."),
        ],
    )
    def test_unknown_layouts(
        self, driver: Driver, tensor: Callable[..., Any], layout: str, shape: tuple[int, ...], message: str
    ) -> None:
        with pytest.raises(LayoutError, match=message):
            PagedKv(driver, [tensor(shape)], layout)

    def test_no_layers(self, driver: Driver) -> None:
        with pytest.raises(LayoutError, match="at least one layer"):
            PagedKv(driver, [], "NHD")
