"""SGLang, imported once in a process of its own: its tests run there, each in a fork."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang import process

INSTALLED = sorted(Path(os.environ.get("SGLANG_INSTALLED_IN", sys.prefix)).glob("sglang-*"))
"""`make test-setup` puts it there."""


@pytest.fixture(scope="package")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests that are marked with `in_sglang` need."""
    assert INSTALLED, "SGLang is not installed: make test-setup"
    process.running = process.ImportedSglang(tmp_path_factory.mktemp("sglang"), INSTALLED[-1])
    yield
    process.running.close()
    process.running = None
