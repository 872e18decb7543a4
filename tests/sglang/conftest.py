"""SGLang, imported once in a process of its own: its tests run there, each in a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang import process

REPOSITORY = Path(__file__).parents[2]
INSTALLED = sorted(Path(os.environ.get("SGLANG_INSTALLED_IN", REPOSITORY / ".venv")).glob("sglang-*"))
"""Made with `pip install --no-deps --target .venv/sglang-VERSION sglang==VERSION`."""


@pytest.fixture(scope="package")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests that are marked with `in_sglang` need."""
    if not INSTALLED:
        pytest.skip("SGLang is not installed in .venv/sglang-VERSION")
    process.running = process.ImportedSglang(tmp_path_factory.mktemp("sglang"), INSTALLED[-1])
    yield
    process.running.close()
    process.running = None
