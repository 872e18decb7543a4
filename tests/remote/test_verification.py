"""What comes from a server is a chunk only when everything in its header is right."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.remote.test_registry import LAYOUT, settings_of
from tiercache.core.header import Header, payload_checksum
from tiercache.errors import CorruptChunk
from tiercache.testing import chunk
from tiercache.tiers.remote.base import NotOurs, RemoteTier


class Verifier(RemoteTier):
    """`verified` alone."""

    async def _connect(self) -> None: ...

    async def _disconnect(self) -> None: ...

    async def _get(self, key: bytes, into: np.ndarray) -> int | None: ...

    async def _put(self, key: bytes, payload: np.ndarray) -> bool: ...  # type: ignore[empty-body]

    async def _exist(self, keys: object) -> list[bool]: ...  # type: ignore[empty-body]

    async def _delete(self, key: bytes) -> bool: ...  # type: ignore[empty-body]


KEY, PAYLOAD = chunk(1, 5000)
PAYLOAD = PAYLOAD[:5000]
HEADER = Header(KEY, LAYOUT.fingerprint, 5000, payload_checksum(PAYLOAD))


def test_the_right_value_has_its_length() -> None:
    tier = Verifier(settings_of())
    assert tier.packed_header(KEY, PAYLOAD) == HEADER.pack()
    assert tier.verified(KEY, HEADER.pack(), PAYLOAD, 5000) == 5000


@pytest.mark.parametrize(
    ("header", "got"),
    [
        (dataclasses.replace(HEADER, key=chunk(2)[0]), 5000),
        (dataclasses.replace(HEADER, fingerprint=bytes(16)), 5000),
        (dataclasses.replace(HEADER, payload_bytes=4999), 5000),
        (dataclasses.replace(HEADER, payload_checksum=1), 5000),
        (HEADER, 4999),
    ],
    ids=["another chunk's", "another layout's", "longer than it says", "damaged", "cut"],
)
def test_a_value_that_is_not_this_chunk_is_corrupt(header: Header, got: int) -> None:
    with pytest.raises(CorruptChunk) as caught:
        Verifier(settings_of()).verified(KEY, header.pack(), PAYLOAD, got)
    assert not isinstance(caught.value, NotOurs)


@pytest.mark.parametrize("left_bytes", [0, 3, 8, 87])
def test_what_is_left_of_a_torn_value_is_corrupt(left_bytes: int) -> None:
    with pytest.raises(CorruptChunk) as caught:
        Verifier(settings_of()).verified(KEY, HEADER.pack()[:left_bytes], PAYLOAD, 0)
    assert not isinstance(caught.value, NotOurs)


@pytest.mark.parametrize("raw", [b"hello", b"x" * 88, HEADER.pack()[1:]])
def test_a_value_that_is_no_chunk_is_not_ours(raw: bytes) -> None:
    with pytest.raises(NotOurs):
        Verifier(settings_of()).verified(KEY, raw, PAYLOAD, 5000)


def test_a_damaged_header_is_corrupt() -> None:
    raw = bytearray(HEADER.pack())
    raw[70] ^= 1
    with pytest.raises(CorruptChunk, match="header checksum"):
        Verifier(settings_of()).verified(KEY, raw, PAYLOAD, 5000)
