"""The digest computed by kernels is XXH3-64 itself."""

import numpy as np
import pytest
import xxhash

from tiercache.device import checksum
from tiercache.device.twin import TwinDriver

LENGTHS = [241, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 65_536, 65_537, 999_983, 2 << 20]


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_xxhash(driver: TwinDriver, length: int) -> None:
    if not driver.has_kernels:
        pytest.skip("no C++ compiler")
    payload = driver.allocate(1 << 22).part(0, length)
    scratch = driver.allocate(1 << 20).part(0, checksum.scratch_bytes(length))
    driver.view(payload)[:] = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    stream = driver.make_stream()
    for _ in range(2):
        expected = xxhash.xxh3_64_intdigest(driver.view(payload))
        result = checksum.begin(driver, payload, scratch, stream)
        driver.synchronize(driver.record(stream))
        assert checksum.finish(driver.view(result).view(np.uint64), length) == expected
        driver.view(payload)[length // 2] ^= 1  # and once more, with one bit changed


def test_short_or_unaligned_payloads_are_refused(driver: TwinDriver) -> None:
    memory, scratch = driver.allocate(8192), driver.allocate(8192)
    with pytest.raises(ValueError, match="at least 241 bytes"):
        checksum.begin(driver, memory.part(0, 240), scratch, driver.make_stream())
    with pytest.raises(ValueError, match="multiple of 8"):
        checksum.begin(driver, memory.part(4, 1000), scratch, driver.make_stream())
