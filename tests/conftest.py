"""Fixtures that several parts share, and the watch for leaks that is on for every test."""

import contextlib
import inspect
import os
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests import needs
from tests.leaks import nothing_left, watch_slots
from tests.made import SHARED_MEMORY, watch_what_is_made
from tiercache.core.layout import Layout
from tiercache.tiers.files.access import file_system_of

# What lives as long as the process is no leak of whichever test is the first to need it.
resource_tracker.ensure_running()
with contextlib.suppress(ImportError):
    import uvloop

    uvloop.new_event_loop().close()
if needs.has_gpu():
    import torch

    torch.zeros(1, device="cuda")
watch_slots()
watch_what_is_made()

_failed = pytest.StashKey[bool]()


@pytest.fixture
def layout() -> Layout:
    """Chunks of 64 tokens and 64 KiB."""
    return Layout("test-model", chunk_tokens=64, bytes_per_token=1024)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory on tmpfs."""
    assert file_system_of(SHARED_MEMORY) == "tmpfs"
    with tempfile.TemporaryDirectory(prefix=f"tiercache-test-{os.getpid()}-", dir=SHARED_MEMORY) as place:
        yield Path(place)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for Unix sockets, whose paths may have 107 characters: `tmp_path` alone can have 75."""
    with tempfile.TemporaryDirectory(prefix="t-") as place:
        yield Path(place)


@pytest.fixture(scope="session")
def lasting_descriptors() -> str:
    """What a library opens once and keeps until the process ends, as a pattern for descriptors. Folders may add to it."""
    return r"/mpl-data/fonts/"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed and call.when != "teardown":
        item.stash[_failed] = True
    return report


@pytest.fixture(autouse=True)
def nothing_leaks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """The test leaves no thread, descriptor, task, child, slot, lease, shared memory or mount that was not there before it.

    What session and module fixtures make is there before. Of a test that has failed nothing more is asked.
    """
    runner = request.getfixturevalue("_function_scoped_runner") if _has_loop(request.node) else None

    def forget_errors() -> None:
        for when in ("setup", "call"):
            caplog.get_records(when).clear()

    lasting = request.getfixturevalue("lasting_descriptors")
    watch = nothing_left(str(tmp_path_factory.getbasetemp()), runner, forget_errors, lasting=lasting)
    watch.__enter__()
    yield
    if not request.node.stash.get(_failed, False):
        watch.__exit__(None, None, None)


def _has_loop(test: pytest.Function) -> bool:
    """Whether the test, or a fixture of it, runs in the event loop that each test gets."""
    functions = [test.function]
    functions += [fixtures[-1].func for fixtures in test._fixtureinfo.name2fixturedefs.values()]
    return any(inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in functions)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(needs, "tests.needs")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))


class _Failures:
    """Says at once what has failed: a run that is ended from outside never comes to its report."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and (terminal := self._config.pluginmanager.get_plugin("terminalreporter")):
            terminal.write_line(f"\n{report.nodeid} ({report.when}):\n{report.longreprtext[-2000:]}")


_TOGETHER = {
    "tests/vllm": "engines",
    "tests/sglang": "sglang",
    "tests/remote/mooncake": "mooncake",
    "tests/remote/s3": "s3",
    "tests/demo/test_demo.py": "demo",
    "tests/readme": "",
}
"""Folders whose tests share what is dear to make (one vLLM's answers, a server), as groups; "": each test for itself."""
_SLOW = (
    "tests/bench/test_bench.py",
    "tests/campaign/test_that_it_can_fail.py",
    "tests/demo",
    "tests/readme/test_readme.py::test_command",
    "tests/readme/test_readme.py::test_program",
    "tests/readme/test_makefile.py",
    *(
        f"tests/vllm/test_{name}.py"
        for name in (
            "disaggregated", "end_to_end", "every_request", "hybrid_models", "offloading_engine", "parallel",
            "same_weights", "versions",
        )
    ),
)  # fmt: skip
"""Not in `make test`: README's commands, and engines of every kind. Engines that stay there: tests/vllm/test_control.py,
test_failed_loads.py, test_logs.py, test_published_events.py, test_server_metrics.py."""
_FIRST = ("tests/vllm", "tests/readme", "tests/demo", "tests/bench", "tests/simulation/test_seeds.py")
"""What takes longest begins first, so that no process has it left at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is slow. For `pytest -n 2 --dist loadgroup`: the tests of a file run in one process, and folders as
    `_TOGETHER` says."""
    for item in items:
        if item.nodeid.startswith(_SLOW):
            item.add_marker("slow")
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        path = item.nodeid.partition("::")[0]
        group = next((group for part, group in _TOGETHER.items() if path.startswith(part)), path)
        if group and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(
        key=lambda item: next((place for place, part in enumerate(_FIRST) if item.nodeid.startswith(part)), len(_FIRST))
    )
