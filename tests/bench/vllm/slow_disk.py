"""A real file system whose disk is slow or hangs on command: a FUSE mount of the 3FS emulator, as a plain disk."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.vllm.servers import OURS, Side, side
from tests.hf3fs_emulator import Hf3fsEmulator, Pace, why_no_fuse
from tiercache.bench.workload import Plan

SLOWER = 100.0
_TRIED_S = 0.02
_FILES = 5
_CHUNK_BYTES = 1 << 18
"""What is larger is a chunk of a model, not a file of the cache's own."""


@dataclass
class SlowDisk:
    """tiercache on the mount. A disk that is slow answers each call that opens or changes a file later, so that reading a
    chunk takes a hundred times as long as it does now; one that hangs answers no call at all."""

    emulator: Hf3fsEmulator
    side: Side
    states: tuple[str, ...] = ("well", "slow", "hanging", "well_again")
    well_s: float = 0.0
    slow_s: float = 0.0
    """What it takes to read a file of a chunk, in either state."""

    @contextmanager
    def being(self, state: str) -> Iterator[None]:
        """The disk is so until the block ends."""
        if state == "slow":
            self._slow_down()
        elif state == "hanging":
            self.emulator.pause()
        try:
            yield
        finally:
            self.emulator.resume()
            self.emulator.control.pace(None)

    def _slow_down(self) -> None:
        """Found out by reading: how many calls a read takes is the kernel's business."""
        found = (path for path in self.emulator.mount.rglob("*") if path.is_file())
        # Before it is slow: looking at each directory takes longer than reading then.
        chunks = [path for path in found if path.stat().st_size > _CHUNK_BYTES][:_FILES]
        self.well_s = _read_s(chunks)
        self.emulator.control.pace(_pace(_TRIED_S))
        self.emulator.control.pace(_pace(call_s(self.well_s, _read_s(chunks), _TRIED_S)))
        self.slow_s = _read_s(chunks[:1])


def _read_s(paths: Sequence[Path]) -> float:
    """The median of some files, from the file system and not from the page cache."""
    taken = []
    for path in paths:
        began = time.perf_counter()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            while size > 0:
                size -= len(os.read(descriptor, size))
        finally:
            os.close(descriptor)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def call_s(well_s: float, tried_s: float, added_s: float) -> float:
    """How much later each call has to be answered for a read to take SLOWER times `well_s`, where it took `tried_s` with
    each answered `added_s` later. A read is one such call at least."""
    calls = max(1, round((tried_s - well_s) / added_s))
    return (SLOWER - 1) * well_s / calls


def _pace(call_s: float) -> Pace:
    return Pace(look_s=call_s, change_s=call_s)


@contextmanager
def slow_disk(plan: Plan, model: Path, place: Path, hot_gb: float) -> Iterator[SlowDisk | None]:
    """None, said in a line, where the machine cannot mount with FUSE. Raises `ServerFailed`."""
    if (reason := why_no_fuse()) is not None:
        plan.progress(f"vLLM: a slow disk is left out: {reason}")
        yield None
        return
    plan.progress("vLLM: starting it with tiercache on a disk that can be slowed down")
    with (
        Hf3fsEmulator(place / "disk") as emulator,
        side(OURS, model, place / "server", hot_gb=hot_gb, disk=emulator.mount / "kv") as ours,
    ):
        yield SlowDisk(emulator, ours)
