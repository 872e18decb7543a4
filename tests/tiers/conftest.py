"""Directories that tests of several file tiers use."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hf3fs_emulator import Hf3fsEmulator, install
from tests.remote.fs.mount import FragileMount

install()


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill_up(device: Path) -> Path:
    """Another program's file takes all room."""
    ballast = device / "ballast"
    with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FragileMount]:
    with FragileMount(tmp_path) as mount:
        yield mount


@pytest.fixture
def kind() -> str:
    """The tier for which `place` is, unless a test names others."""
    return "disk"


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Iterator[Path]:
    """A directory on what the `kind` needs: tmpfs, a 3FS mount, or any file system."""
    with ExitStack() as stack:
        above = tmp_path
        if kind == "hf3fs":
            above = stack.enter_context(Hf3fsEmulator()).mount
        elif kind == "shared_memory":
            above = request.getfixturevalue("in_memory")
        (above / "kv").mkdir()
        yield above / "kv"
