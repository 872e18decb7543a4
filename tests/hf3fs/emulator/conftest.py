"""An emulator of each kind, and a client of it that cleans up after itself."""

from collections.abc import Iterator

import pytest

from tests.hf3fs.emulator.client import Client
from tiercache.testing.hf3fs import Hf3fsEmulator, why_no_fuse

NO_FUSE = why_no_fuse()
needs_fuse = pytest.mark.skipif(NO_FUSE is not None, reason=f"no FUSE mounts here: {NO_FUSE}")


@pytest.fixture(params=[pytest.param("fuse", marks=needs_fuse), "directory"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "directory":
        monkeypatch.setenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", "yes")
    return request.param


@pytest.fixture
def emulator(kind: str) -> Iterator[Hf3fsEmulator]:
    with Hf3fsEmulator(fuse=kind == "fuse") as emulator:
        yield emulator


@pytest.fixture
def client(emulator: Hf3fsEmulator) -> Iterator[Client]:
    client = Client(emulator)
    yield client
    client.close()
