"""An emulator of each kind, and a client of it that cleans up after itself."""

from collections.abc import Iterator

import pytest

from tests.hf3fs.emulator.client import Client
from tests.hf3fs_emulator import Hf3fsEmulator
from tests.needs import needs_fuse


@pytest.fixture(scope="module", params=[pytest.param("fuse", marks=needs_fuse), "directory"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "directory":
            patch.setenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP", "yes")
        yield request.param


@pytest.fixture(scope="module")
def shared_emulator(kind: str) -> Iterator[Hf3fsEmulator]:
    with Hf3fsEmulator(fuse=kind == "fuse") as emulator:
        yield emulator


@pytest.fixture
def emulator(shared_emulator: Hf3fsEmulator) -> Iterator[Hf3fsEmulator]:
    """One that other tests have used before. Nothing is registered and no fault waits, before the test and after it."""
    yield shared_emulator
    shared_emulator.resume()
    try:
        shared_emulator.control.clear()
        shared_emulator.control.until_registered(buffers=0, rings=0)
        shared_emulator.control.until_open_files(0)
    except TimeoutError:
        shared_emulator.restart()  # what this test left is not the next one's fault
        raise


@pytest.fixture
def client(emulator: Hf3fsEmulator) -> Iterator[Client]:
    client = Client(emulator)
    yield client
    client.close()
