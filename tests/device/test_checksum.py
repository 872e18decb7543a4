"""The digest computed by kernels is XXH3-64 itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from tests.device.conftest import settle
from tiercache.device import checksum
from tiercache.device.driver import Driver, Span

LENGTHS = [241, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 65_536, 65_537, 999_983, 2 << 20]


@pytest.mark.needs("g++")
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_xxhash(driver: Driver, tensor: Callable[..., Any], length: int) -> None:
    payload = tensor((length,), torch.uint8, seed=length)
    scratch = tensor((checksum.scratch_bytes(length),), torch.uint8)
    stream = driver.make_stream()
    for _ in range(2):
        expected = xxhash.xxh3_64_intdigest(payload.cpu().numpy())
        place = Span(scratch.data_ptr(), scratch.numel())
        result = checksum.begin(driver, Span(payload.data_ptr(), length), place, stream)
        driver.synchronize(driver.record(stream))
        assert result == place.part(0, checksum.RESULT_BYTES)
        accumulators = scratch[: checksum.RESULT_BYTES].cpu().numpy().view(np.uint64)
        assert checksum.finish(accumulators, length) == expected
        payload[length // 2] ^= 1  # and once more, with one bit changed
        settle(driver)


def test_short_or_unaligned_payloads_are_refused(driver: Driver, tensor: Callable[..., Any]) -> None:
    address = tensor((8192,), torch.uint8).data_ptr()
    with pytest.raises(ValueError, match="at least 241 bytes"):
        checksum.begin(driver, Span(address, 240), Span(address, 8192), driver.current_stream())
    with pytest.raises(ValueError, match="multiple of 8"):
        checksum.begin(driver, Span(address + 4, 1000), Span(address, 8192), driver.current_stream())
