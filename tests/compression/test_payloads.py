"""Compressed and made plain again, bit for bit; and what is no compressed payload is none."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compression.payloads import kv, noise
from tiercache.core.compression import Codec
from tiercache.core.header import Header, aligned, payload_checksum
from tiercache.errors import CorruptChunk
from tiercache.testing import page_aligned
from tiercache.tiers.compression import Compression, Packed, compress, unpacked

FINGERPRINT = b"f" * 16
MIB = 1 << 20
CHUNK_BYTES = 2 * MIB + 123 * 4096 + 10


def packed(mode: str, payload: np.ndarray, length_bytes: int, item_bytes: int = 2) -> Packed:
    return Compression(mode, item_bytes).pack(b"k" * 24, FINGERPRINT, payload, length_bytes)


def landed(stored: Packed, room_bytes: int) -> np.ndarray:
    """Return the payload as a read leaves it in a slot, with a foreign page after it."""
    memory = page_aligned(room_bytes + 4096)
    memory[: stored.payload.nbytes] = stored.payload
    memory[aligned(room_bytes) :] = 0xAA
    return memory


@settings(max_examples=60, deadline=None)
@given(
    length=st.one_of(st.integers(1, 70_000), st.just(CHUNK_BYTES)),
    mode=st.sampled_from(["none", "lz4", "zstd"]),
    item_bytes=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["kv", "noise", "zeroes"]),
)
def test_every_payload_comes_back_bit_for_bit(length: int, mode: str, item_bytes: int, kind: str) -> None:
    _, payload = noise(length, length) if kind == "noise" else kv(length, length)
    if kind == "zeroes":
        payload[:] = 0
    with packed(mode, payload, length, item_bytes) as stored:
        header = Header.check(stored.header.pack(), b"k" * 24, FINGERPRINT)
        assert payload_checksum(stored.payload) == header.payload_checksum
        assert stored.padded.nbytes == aligned(header.payload_bytes) and not stored.padded[header.payload_bytes :].any()
        memory = landed(stored, length)
    assert unpacked(header, memory[: aligned(length)]) == length
    assert np.array_equal(memory[:length], payload[:length])
    assert (memory[aligned(length) :] == 0xAA).all()


@pytest.mark.parametrize(("mode", "most"), [("lz4", 0.85), ("zstd", 0.75)])
def test_kv_becomes_shorter(mode: str, most: float) -> None:
    _, payload = kv(1, CHUNK_BYTES)
    with packed(mode, payload, CHUNK_BYTES) as stored:
        assert stored.header.codec is Codec[mode.upper()]
        assert stored.header.payload_bytes < most * CHUNK_BYTES


def test_noise_is_stored_plain_and_where_it_lies() -> None:
    _, payload = noise(1, CHUNK_BYTES)
    with packed("zstd", payload, CHUNK_BYTES) as stored:
        assert stored.header.codec is Codec.PLAIN and stored.padded is payload


def test_memory_is_taken_for_each_chunk_at_a_time_and_used_again() -> None:
    """It lies beside the arena, in no budget of it: this is its bound."""
    compression, (_, payload) = Compression("zstd", 2), kv(1, CHUNK_BYTES)

    def pack() -> Packed:
        return compression.pack(b"k" * 24, FINGERPRINT, payload, CHUNK_BYTES)

    with pack() as one, pack() as other:
        places = {stored.padded.ctypes.data for stored in (one, other)}
        assert len(places) == 2
    with pack() as one, pack() as other:
        assert {stored.padded.ctypes.data for stored in (one, other)} == places


def test_memory_that_is_used_again_is_long_enough_and_no_earlier_chunk_is_stored_behind() -> None:
    compression, (_, payload) = Compression("zstd", 2), kv(1, CHUNK_BYTES)
    for length in (5000, CHUNK_BYTES, 70_000):
        with compression.pack(b"k" * 24, FINGERPRINT, payload, length) as stored:
            assert stored.header.codec is Codec.ZSTD
            assert not stored.padded[stored.header.payload_bytes :].any()


@pytest.mark.parametrize("mode", ["lz4", "zstd"])
def test_no_changed_byte_is_ever_taken_for_the_payload(mode: str) -> None:
    """Not even where the stored checksum fits, which a reader has compared before."""
    length = 12_000
    _, payload = kv(1, length)
    with packed(mode, payload, length) as stored:
        assert stored.header.codec is not Codec.PLAIN
        for position in range(stored.header.payload_bytes):
            memory = landed(stored, length)
            memory[position] ^= 1 << position % 8
            try:
                assert unpacked(stored.header, memory[: aligned(length)]) == length
            except CorruptChunk:
                pass
            else:  # a bit that the codec does not use
                assert np.array_equal(memory[:length], payload[:length])
            assert (memory[aligned(length) :] == 0xAA).all()


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    zeroes = page_aligned(64 * MIB)
    into = page_aligned(64 * MIB)
    stored_bytes = compress(zeroes, Codec.ZSTD, np.dtype("u2"), into)
    assert stored_bytes < 64 * 4096
    header = Header(b"k" * 24, FINGERPRINT, stored_bytes, 0, Codec.ZSTD)
    memory = page_aligned(MIB + 4096)
    memory[:stored_bytes] = into[:stored_bytes]
    memory[MIB:] = 0xAA
    with pytest.raises(CorruptChunk, match="at most 1048576 plain bytes|at most 0 plain bytes"):
        unpacked(header, memory[:MIB])
    assert (memory[MIB:] == 0xAA).all()


@pytest.mark.parametrize(("field", "length"), [(12, 200_000), (20, 200_000), (20, 0), (20, 15)])
def test_a_frame_of_another_length_never_reaches_the_decoder(field: int, length: int) -> None:
    """At 12 stands the plain length of the first frame, at 20 that of the frame itself."""
    _, payload = kv(1, 100_000)
    with packed("zstd", payload, 100_000) as stored:
        memory = landed(stored, 100_000)
    memory[field : field + 4] = np.frombuffer(length.to_bytes(4, "little"), np.uint8)
    with pytest.raises(CorruptChunk, match=f"found {length}"):
        unpacked(stored.header, memory[:100_000])


def test_what_is_too_short_for_a_frame_is_none() -> None:
    memory = page_aligned(4096)
    memory[:8] = np.frombuffer(payload_checksum(b"").to_bytes(8, "little"), np.uint8)
    for length in range(1, 24):
        with pytest.raises(CorruptChunk):
            unpacked(Header(b"k" * 24, FINGERPRINT, length, 0, Codec.ZSTD), memory)


def test_threads_do_not_share_what_they_work_in() -> None:
    compression, failures = Compression("zstd", 2), []

    def work(seed: int) -> None:
        for number in range(seed, seed + 6):
            _, payload = kv(number, 300_000)
            with compression.pack(b"k" * 24, FINGERPRINT, payload, 300_000) as stored:
                memory = landed(stored, 300_000)
            if unpacked(stored.header, memory[: aligned(300_000)]) != 300_000 or memory[:300_000].tobytes() != (
                payload[:300_000].tobytes()
            ):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(0, 400, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_auto_learns_what_the_codecs_do_and_follows_the_link() -> None:
    compression = Compression("auto", 2)
    _, payload = kv(1, CHUNK_BYTES)
    with compression.pack(b"k" * 24, FINGERPRINT, payload, CHUNK_BYTES) as stored:
        assert stored.header.codec is Codec.PLAIN, "nothing is known of the link yet"
    compression.sent(CHUNK_BYTES, 10.0)
    with compression.pack(b"k" * 24, FINGERPRINT, payload, CHUNK_BYTES) as stored:
        assert stored.header.codec is Codec.ZSTD
    for _ in range(200):
        compression.sent(CHUNK_BYTES, 1e-6)
        compression.received(CHUNK_BYTES, 1e-6)
    with compression.pack(b"k" * 24, FINGERPRINT, payload, CHUNK_BYTES) as stored:
        assert stored.header.codec is Codec.PLAIN


WITHOUT = """
import sys
sys.modules["numcodecs"] = None
import numpy as np
from tiercache.core.compression import Codec
from tiercache.core.header import Header
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.tiers.compression import Compression, unpacked

payload = np.zeros(8192, np.uint8)
auto = Compression("auto", 2)
auto.sent(1, 10.0)
with auto.pack(b"k" * 24, b"f" * 16, payload, 8192) as stored:
    assert stored.header.codec is Codec.PLAIN
for call, error in (
    (lambda: Compression("zstd", 2, tier="disk"), ConfigError),
    (lambda: unpacked(Header(b"k" * 24, b"f" * 16, LENGTH, 0, Codec.ZSTD), MEMORY), TierUnavailable),
):
    try:
        call()
    except error as caught:
        print(caught)
    else:
        raise SystemExit(f"no {error.__name__}")
"""


def test_without_the_library_auto_stores_plain_and_compressed_chunks_are_left_where_they_are() -> None:
    _, payload = kv(1, 8192)
    with packed("zstd", payload, 8192) as stored:
        memory, length = stored.padded.tobytes(), stored.header.payload_bytes
    script = WITHOUT.replace("MEMORY", f"np.frombuffer({memory!r}, np.uint8).copy()").replace("LENGTH", str(length))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("disk: compression by zstd needs numcodecs") and "cannot be imported" in done.stdout
