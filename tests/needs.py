"""What tests need of the machine, over Python and the packages that `make test` installs.

`@pytest.mark.needs("redis-server")` leaves a test out where that is missing, and one line at the end of the run says how
many tests were left out for what, and what to do about it. `@pytest.mark.uses("fuse3")` marks a test that runs anywhere and
does more where that is there. `-m system_packages` selects the tests that need or use a system package.

A plugin of pytest. `python -m tests.needs` prints the system packages that this machine lacks.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LONG = "LONG_TESTS" in os.environ
RDMA_DEVICES = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
LMCACHE_CLI = Path(__file__).parents[1] / "build" / "lmcache-cli"
_CAP_SYS_ADMIN = 21


def has_program(*names: str) -> bool:
    return any(shutil.which(name) is not None for name in names)


def has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def has_fuse_device() -> bool:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def may_mount() -> bool:
    (effective,) = re.findall(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


@cache
def has_gpu() -> bool:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


SYSTEM_PACKAGES: Mapping[str, Callable[[], bool]] = {
    "redis-server": lambda: has_program("redis-server"),
    "fuse3": lambda: has_program("fusermount3"),
    "openssl": lambda: has_program("openssl"),
    "libibverbs1": lambda: has_library("libibverbs.so.1"),
    "g++": lambda: has_program("g++", "c++") and has_program("gcc", "cc"),
    "curl": lambda: has_program("curl"),
}
"""By their names in Debian and Ubuntu."""

OTHERS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "/dev/fuse": (has_fuse_device, "a kernel or container that has it"),
    "mount": (may_mount, "CAP_SYS_ADMIN"),
    "root": (lambda: os.geteuid() == 0, "run as root"),
    "GPU": (has_gpu, "make gpu-check, on a machine with a CUDA GPU"),
    "no GPU": (lambda: not has_gpu(), "a machine without one"),
    "RDMA": (lambda: bool(RDMA_DEVICES), "an RDMA device"),
    "minutes": (lambda: LONG, "make long-test"),
    "lmcache-cli": (
        (LMCACHE_CLI / "lmcache").is_dir,
        "pip install --no-deps --target build/lmcache-cli lmcache-cli",
    ),
}
"""What else a test may need, and how to have it."""

needs_fuse = pytest.mark.needs("fuse3", "/dev/fuse")
takes_minutes = pytest.mark.needs("minutes")


@cache
def is_there(need: str) -> bool:
    return SYSTEM_PACKAGES[need]() if need in SYSTEM_PACKAGES else OTHERS[need][0]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(name, ...): left out where the machine lacks one of them (tests/needs.py)")
    config.addinivalue_line("markers", "uses(package, ...): runs without these system packages, and does more with them")
    config.addinivalue_line("markers", "slow: not in `make test`, but in `make test-rest`; set by tests/conftest.py")
    config.addinivalue_line("markers", "system_packages: needs or uses a system package; set by tests/needs.py")
    config.pluginmanager.register(_LeftOut(config))


class _LeftOut:
    """Leaves tests out, and counts them by what they lack: in each process that collects, for the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._counts: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Any:
        """Before `-m` and `-k` select, the marker is set; what they did not select is not counted."""
        for item in items:
            if any(name in SYSTEM_PACKAGES for name in [*_named(item, "needs"), *_named(item, "uses")]):
                item.add_marker("system_packages")
        yield
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            missing = [need for need in dict.fromkeys(_named(item, "needs")) if not is_there(need)]
            self._counts.update(missing)
            (left_out if missing else kept).append(item)
        if left_out:
            items[:] = kept
            self._config.hook.pytest_deselected(items=left_out)
        if (output := getattr(self._config, "workeroutput", None)) is not None:
            output["left_out"] = dict(self._counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist has ended. Each has collected all tests."""
        self._counts = self._counts or Counter(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._counts:
            terminalreporter.write_line(_sentence(self._counts))


def _named(item: pytest.Item, marker: str) -> list[str]:
    names = [name for mark in item.iter_markers(marker) for name in mark.args]
    unknown = [name for name in names if name not in SYSTEM_PACKAGES and name not in OTHERS]
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: tests/needs.py knows nothing named {', '.join(unknown)}")
    return names


def _sentence(counts: Mapping[str, int]) -> str:
    """One line: the tests that each package would add and the command that installs all, then what else is missing."""
    packages = [name for name in SYSTEM_PACKAGES if counts.get(name)]
    parts = []
    if packages:
        listed = ", ".join(f"{name} ({_tests(counts[name])})" for name in packages)
        parts.append(f"{listed}: apt-get install --no-install-recommends {' '.join(packages)}")
    parts += [f"{name} ({_tests(counts[name])}): {remedy}" for name, (_, remedy) in OTHERS.items() if counts.get(name)]
    return f"left out for what this machine lacks: {'; '.join(parts)}"


def _tests(count: int) -> str:
    return f"{count} test" if count == 1 else f"{count} tests"


if __name__ == "__main__":
    print(*(name for name in SYSTEM_PACKAGES if not is_there(name)))
