"""Room for a file, and file systems that have no call for it."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from tiercache.tiers.files.access import file_system_of
from tiercache.tiers.files.format import reserve, spread


def test_more_than_the_device_has_fails_at_once() -> None:
    descriptor = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            reserve(descriptor, 1 << 50)
    finally:
        os.close(descriptor)


def test_file_without_the_call_is_left_as_it_is(tmp_path: Path) -> None:
    """What /proc answers is what a file system without fallocate answers."""
    descriptor = os.open("/proc/self/comm", os.O_RDWR)
    try:
        reserve(descriptor, 4096)
    finally:
        os.close(descriptor)


def test_directories_below_lie_apart_where_the_file_system_can_do_that(tmp_path: Path) -> None:
    """`lsattr` says T then; nothing changes where it has no such hint, or where there is no directory."""
    before = attributes(tmp_path)
    spread(tmp_path)
    spread(tmp_path / "missing")
    if file_system_of(tmp_path) != "ext4" or not before:
        pytest.skip("needs lsattr and a temporary directory on ext4")
    assert attributes(tmp_path) == before | {"T"}


def attributes(directory: Path) -> set[str]:
    said = subprocess.run(["lsattr", "-d", directory], capture_output=True, text=True, check=False).stdout
    return set(said.partition(" ")[0]) - {"-"}
