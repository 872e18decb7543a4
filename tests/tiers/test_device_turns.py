"""So many large writes are at a device at a time; none waits for ever."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from tests.tiers.test_disk import opened
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files import format as chunk_format


@pytest.mark.parametrize(("patience_s", "together"), [(60.0, 2), (0.001, 3)], ids=["each waits", "those there hang"])
async def test_two_threads_hand_over_bytes_at_a_time_unless_they_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patience_s: float, together: int
) -> None:
    monkeypatch.setattr(chunk_format, "_PATIENCE_S", patience_s)
    monkeypatch.setattr(chunk_format, "LARGE_BYTES", CHUNK_BYTES)
    counting, pwritev = threading.Lock(), os.pwritev
    at_device, most_at_device, writing = 0, 0, threading.Barrier(together)

    def counted(descriptor: int, *arguments: object) -> int:
        nonlocal at_device, most_at_device
        with counting:
            at_device += 1
            most_at_device = max(most_at_device, at_device)
        writing.wait(10.0)  # until others are there
        written = pwritev(descriptor, *arguments)  # type: ignore[arg-type]
        with counting:
            at_device -= 1
        return written

    async with opened(tmp_path, threads=4) as tier:
        monkeypatch.setattr(os, "pwritev", counted)
        writes = [tier.write(*chunk(number), CHUNK_BYTES) for number in range(6)]
        assert all(await asyncio.gather(*writes))
    assert most_at_device == 2 if together == 2 else most_at_device >= 3
