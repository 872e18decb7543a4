"""A place like a fresh clone in which the README's commands run as a reader types them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.readme.blocks import REPOSITORY

SMALL = "max_local_cpu_size: 0.05\nlocal_disk: {place}/kv\nmax_local_disk_size: 0.2\n"

Shell = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The repository's files by links; what commands write stays here."""
    files = "Makefile examples pyproject.toml requirements tests tiercache README.md LICENSE"
    for name in files.split():
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "small.yaml").write_text(SMALL.format(place=tmp_path))
    return tmp_path


@pytest.fixture
def environment() -> dict[str, str]:
    """This Python and this tree first; nothing that configures the cache, or tells a make that it is another's. A vLLM
    computes on one core, as another test may have one beside it, and is two processes instead of three: each imports it."""
    others = ("TIERCACHE_", "LMCACHE_", "PYTEST", "MAKE", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    paths = {"PATH": f"{sys.prefix}/bin:{kept['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    one_core = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return kept | paths | one_core | {"HF_HUB_OFFLINE": "1"}


@pytest.fixture
def shell(place: Path, environment: dict[str, str]) -> Shell:
    def run(command: str, status: int = 0, limit_s: float = 1200, **more: str) -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": limit_s}
        found = subprocess.run(["bash", "-c", command], cwd=place, env=environment | more, check=False, **options)
        assert found.returncode == status, f"$ {command}\n{found.stdout[-4000:]}\n{found.stderr[-4000:]}"
        return found

    return run
