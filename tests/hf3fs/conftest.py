"""What all tests of 3FS share: the emulator's modules under their real names, and a watch for leaks."""

import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tiercache.testing.hf3fs import install

install()
resource_tracker.ensure_running()  # its pipe is no leak of whichever test is the first to use shared memory

PATIENCE_S = 5.0

OURS = re.compile(rf"3fs.*[.-]{os.getpid()}([.-]|$)")
"""Names of what this process made, and not another one that runs these tests at the same time."""


def _held() -> dict[str, set[str]]:
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the one that reads this directory
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "descriptors": descriptors,
        "shared memory": {name for name in os.listdir("/dev/shm") if OURS.search(name)},
        "mapped": set(re.findall(r"/dev/shm/\S+", Path("/proc/self/maps").read_text())),
        "mounts": {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if OURS.search(line)},
    }


@pytest.fixture(autouse=True)
def nothing_leaks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Threads, descriptors, shared memory and mounts are what they were before."""
    before = _held()
    yield
    caplog.get_records("call").clear()  # errors that were logged keep frames, which keep memory
    until_s = time.monotonic() + PATIENCE_S
    while (more := _more(before)) and time.monotonic() < until_s:
        gc.collect()  # and threads that were told to end may still be about to
    assert not more


def _more(before: dict[str, set[str]]) -> dict[str, set[str]]:
    after = _held()
    return {what: after[what] - before[what] for what in after if after[what] - before[what]}
