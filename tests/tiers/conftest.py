"""Directories that tests of several file tiers use."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hf3fs_emulator import Hf3fsEmulator, install, why_no_fuse

install()


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on what the `kind` needs: tmpfs, a 3FS mount, or any file system."""
    kind = request.getfixturevalue("kind")
    if kind == "hf3fs":
        without_fuse = bool(why_no_fuse())
        if without_fuse:
            monkeypatch.setenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", "yes")
        with Hf3fsEmulator(fuse=not without_fuse) as emulator:
            directory = emulator.mount / "kv"
            directory.mkdir()
            yield directory
    elif kind == "shared_memory":
        directory = request.getfixturevalue("in_memory") / "kv"
        directory.mkdir()
        yield directory
    else:
        directory = tmp_path / "kv"
        directory.mkdir()
        yield directory
