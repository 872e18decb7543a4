"""What all tests of 3FS share: the emulator's modules under their real names, and a watch for memory that stays mapped."""

import gc
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hf3fs_emulator import install
from tests.leaks import PATIENCE_S

install()


def _mapped() -> set[str]:
    # But for semaphores: importing numcodecs makes one for good.
    return set(re.findall(r"/dev/shm/(?!sem\.)\S+", Path("/proc/self/maps").read_text()))


@pytest.fixture(autouse=True)
def nothing_stays_mapped(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Shared memory that was removed by name is unmapped, too."""
    before = _mapped()
    yield
    caplog.get_records("call").clear()  # errors that were logged keep frames, which keep memory
    until_s = time.monotonic() + PATIENCE_S
    while (more := _mapped() - before) and time.monotonic() < until_s:
        gc.collect()  # and threads that were told to end may still be about to
    assert not more
