"""SIGTERM ends a program as Ctrl-C does: what it has made for itself is gone afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.readme.blocks import REPOSITORY
from tiercache.signals import ended_by_signals

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
LEAVES = ("tempfile", "subprocess", "serving(")
"""What an example uses that outlives it where it is not given back."""


@pytest.fixture(autouse=True)
def nothing_is_ignored() -> Iterator[None]:
    """As in the foreground of a shell; in its background Ctrl-C is ignored, and below nohup the end of its terminal."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}
    before = {signum: signal.signal(signum, handler) for signum, handler in usual.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_what_awaits_gives_back_what_it_has(signum: signal.Signals) -> None:
    said = []

    async def program() -> None:
        try:
            os.kill(os.getpid(), signum)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            said.append("given back")

    before = signal.getsignal(signum)
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        asyncio.run(program())
    assert said == ["given back"]
    assert signal.getsignal(signum) is before


def test_what_computes_is_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ended_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)


def test_a_benchmark_leaves_nothing_behind(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "tiercache", "bench", "--only", "disk", "--directory", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        until_s = time.monotonic() + 60
        while not list(data.glob("*/*/tiercache-chunks/??/*")):
            assert process.poll() is None and time.monotonic() < until_s
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_that_have_something_to_give_back_do(example: Path) -> None:
    text = example.read_text()
    assert ("with ended_by_signals():" in text) == any(word in text for word in LEAVES)
