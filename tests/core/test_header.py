"""A header is believed only when every bit of it is what was written."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core.header import PACKED_BYTES, Header, HeaderError

HEADER = Header(b"k" * 24, b"f" * 16, 12345, 0xDEADBEEF)


@given(
    st.binary(min_size=1, max_size=32),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**63),
    st.integers(0, 2**64 - 1),
)
def test_unpack_returns_what_was_packed(key: bytes, fingerprint: bytes, length: int, checksum: int) -> None:
    header = Header(key, fingerprint, length, checksum)
    assert Header.unpack(header.pack()) == header


@given(st.integers(0, PACKED_BYTES * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    raw = bytearray(HEADER.pack())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HeaderError):
        Header.unpack(raw)


@given(st.integers(0, PACKED_BYTES - 1))
def test_short_header_is_noticed(length: int) -> None:
    with pytest.raises(HeaderError, match=f"expected {PACKED_BYTES} bytes, found {length}"):
        Header.unpack(HEADER.pack()[:length])


@pytest.mark.parametrize(
    ("key", "fingerprint", "said"),
    [(b"", b"f" * 16, "key"), (b"k" * 33, b"f" * 16, "key"), (b"k" * 24, b"f" * 15, "fingerprint")],
)
def test_fields_of_another_length_are_refused(key: bytes, fingerprint: bytes, said: str) -> None:
    with pytest.raises(HeaderError, match=f"{said}: expected"):
        Header(key, fingerprint, 12345, 0).pack()


@pytest.mark.parametrize("length", [0, 33])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    fields = HEADER.pack()[:12] + length.to_bytes(2, "little") + HEADER.pack()[14:80]
    with pytest.raises(HeaderError, match=f"key length: expected 1..32, found {length}"):
        Header.unpack(fields + xxhash.xxh3_64_digest(fields)[::-1])


def test_zeroes_and_foreign_bytes_are_no_header() -> None:
    for raw in (bytes(4096), b"\x7fELF" + bytes(4092)):
        with pytest.raises(HeaderError, match="magic"):
            Header.unpack(raw)


def test_other_key_or_layout_is_refused_with_both_named() -> None:
    raw = HEADER.pack()
    with pytest.raises(HeaderError, match="key: expected 6a6a.*found 6b6b"):
        Header.check(raw, b"j" * 24, b"f" * 16)
    with pytest.raises(HeaderError, match="layout: expected 6767.*found 6666"):
        Header.check(raw, b"k" * 24, b"g" * 16)
    assert Header.check(raw, b"k" * 24, b"f" * 16) == Header.check(raw, b"k" * 24, None) == HEADER
