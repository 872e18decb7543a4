"""So many writes are at a device at a time, and none waits long for another."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from tests.tiers.test_disk import opened
from tiercache.testing import chunk
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.files import format as chunk_format
from tiercache.tiers.files.format import LARGE_BYTES, DeviceTurns


def in_thread(turns: DeviceTurns, until: threading.Event) -> tuple[threading.Thread, threading.Event]:
    """Return a thread that takes a turn and keeps it until `until`, and the event that it sets when it has the turn."""
    began = threading.Event()

    def work() -> None:
        with turns.taken(LARGE_BYTES):
            began.set()
            assert until.wait(10.0)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, began


def test_write_that_hangs_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_format, "_PATIENCE_S", 0.001)
    turns, end = DeviceTurns(1), threading.Event()
    hung, began = in_thread(turns, end)
    assert began.wait(10.0)
    other, other_began = in_thread(turns, end)
    assert other_began.wait(10.0)
    end.set()
    for thread in (hung, other):
        thread.join(10.0)


async def test_disk_writes_with_more_threads_than_hand_over_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chunk_format, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(chunk_format, "LARGE_BYTES", CHUNK_BYTES)
    counting, pwritev = threading.Lock(), os.pwritev
    at_device, most_at_device, writing = 0, 0, threading.Barrier(2)

    def counted(descriptor: int, *arguments: object) -> int:
        nonlocal at_device, most_at_device
        with counting:
            at_device += 1
            most_at_device = max(most_at_device, at_device)
        writing.wait(10.0)  # until another one is there
        written = pwritev(descriptor, *arguments)  # type: ignore[arg-type]
        with counting:
            at_device -= 1
        return written

    async with opened(tmp_path, threads=4) as tier:
        monkeypatch.setattr(os, "pwritev", counted)
        writes = [tier.write(*chunk(number), CHUNK_BYTES) for number in range(8)]
        assert all(await asyncio.gather(*writes))
    assert most_at_device == 2
