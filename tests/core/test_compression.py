"""Which chunks are compressed, and what their headers say."""

import struct

import pytest
import xxhash

from tiercache.core.compression import Codec, CompressionChoice, item_bytes
from tiercache.core.header import Header, HeaderError

GBPS = 1e-9
"""Seconds a byte."""
MIB = 1 << 20


def choice(*, sending_gbps: float, receiving_gbps: float | None = None, busy: float = 1.0) -> CompressionChoice:
    """What one core makes of bfloat16, where others want it, too, by `busy`."""
    made = CompressionChoice(concurrency=4)
    made.tried(MIB, int(0.68 * MIB), busy * MIB * GBPS / 0.4, busy * MIB * GBPS / 1.8)
    made.sent(MIB, MIB * GBPS / sending_gbps)
    if receiving_gbps is not None:
        made.received(MIB, MIB * GBPS / receiving_gbps)
    return made


@pytest.mark.parametrize(
    ("sending_gbps", "receiving_gbps", "codec"),
    [
        (0.31, 0.31, Codec.ZSTD),  # of 10 Gbit/s, shared by four
        (0.5, 0.2, Codec.PLAIN),  # Zstandard would not keep up
        (0.4, 0.7, Codec.PLAIN),  # an NVMe drive, shared by four
        (0.1, None, Codec.ZSTD),  # nothing was read yet
    ],
)
def test_the_slower_a_tier_the_more_is_compressed(sending_gbps: float, receiving_gbps: float | None, codec: Codec) -> None:
    assert choice(sending_gbps=sending_gbps, receiving_gbps=receiving_gbps).codec is codec


def test_where_others_want_the_cores_less_is_compressed() -> None:
    assert choice(sending_gbps=0.31, receiving_gbps=0.31, busy=2.0).codec is Codec.PLAIN


def test_a_link_that_changes_changes_the_choice() -> None:
    made = choice(sending_gbps=1.25, receiving_gbps=1.25)
    assert made.codec is Codec.PLAIN
    for gbps, codec in ((0.05, Codec.ZSTD), (2.5, Codec.PLAIN)):
        for _ in range(64):
            made.sent(MIB, MIB * GBPS / gbps)
            made.received(MIB, MIB * GBPS / gbps)
        assert made.codec is codec


def test_what_cannot_be_made_shorter_is_left_alone_however_slow_the_link() -> None:
    made = CompressionChoice()
    made.tried(MIB, int(0.96 * MIB), MIB * GBPS, MIB * GBPS)
    made.sent(MIB, 10.0)
    assert made.codec is Codec.PLAIN


def test_the_codec_is_tried_again_and_again() -> None:
    made = CompressionChoice()
    due = [made.trial_due() for _ in range(600)]
    assert [position for position, is_due in enumerate(due) if is_due] == [0, 256, 512]


@pytest.mark.parametrize(
    ("name", "length"),
    [("bfloat16", 2), ("float16", 2), ("torch.bfloat16", 2), ("half", 2), ("float32", 4), ("float", 4),
     ("fp8", 1), ("fp8_e4m3", 1), ("torch.float8_e5m2", 1), ("uint8", 1), ("opaque", 1), ("", 1), ("nvfp4", 1)],
)  # fmt: skip
def test_the_length_of_a_number_by_the_name_of_its_type(name: str, length: int) -> None:
    assert item_bytes(name) == length


def test_a_header_says_its_codec_and_plain_ones_are_as_they_were() -> None:
    plain = Header(b"k" * 24, b"f" * 16, 1000, 7)
    assert plain.pack()[8:16] == struct.pack("<II", 1, 24)
    packed = Header(b"k" * 24, b"f" * 16, 1000, 7, Codec.ZSTD)
    assert Header.unpack(packed.pack()) == packed and packed.pack()[8:12] == struct.pack("<I", 3)


@pytest.mark.parametrize(("version", "codec"), [(1, 2), (2, 2), (3, 0), (3, 9), (4, 0)])
def test_a_codec_that_the_version_does_not_have_is_refused(version: int, codec: int) -> None:
    raw = bytearray(Header(b"k" * 24, b"f" * 16, 1000, 7).pack())
    raw[8:12], raw[14:16] = struct.pack("<I", version), struct.pack("<H", codec)
    raw[80:88] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(raw[:80])))
    with pytest.raises(HeaderError, match="codec|version"):
        Header.unpack(raw)
