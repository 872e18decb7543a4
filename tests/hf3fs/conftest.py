"""What all tests of 3FS share: the emulator's modules under their real names, and a watch for leaks."""

import gc
import os
import re
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tiercache.testing.hf3fs import install

install()
resource_tracker.ensure_running()  # its pipe is no leak of whichever test is the first to use shared memory

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
        "mounts": {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if OURS.search(line)},
    }


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Threads, descriptors, shared memory and mounts are what they were before."""
    before = _held()
    yield
    after = _held()
    if any(after[what] - before[what] for what in after):
        gc.collect()
        after = _held()
    assert {what: after[what] - before[what] for what in after} == {what: set() for what in after}
