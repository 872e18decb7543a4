"""Tests whose bodies run in a process that has imported SGLang (`within.py`), which forks for each."""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60.0
"""For the import as well as for each test."""


class ImportedSglang:
    def __init__(self, directory: Path, installed: Path) -> None:
        self._log = directory / "sglang.log"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sglang.within", str(installed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"TIERCACHE_CONFIG_FILE": "", "LMCACHE_CONFIG_FILE": ""},
        )

    def run(self, test: dict[str, Any]) -> None:
        """Raises AssertionError with what the test said."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(test) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], LIMIT_S)[0]:
            self._process.kill()
            raise AssertionError(f"not within {LIMIT_S:.0f} s: {self._log.read_text()[-4000:]}")
        line = self._process.stdout.readline()
        assert line, self._log.read_text()[-6000:]
        answer = json.loads(line)
        assert answer["status"] == 0, answer["said"]

    def close(self) -> None:
        with self._process:  # closes its input, which tells it to end, and waits
            pass


running: ImportedSglang | None = None


def in_sglang(test: Callable[..., None]) -> Callable[..., None]:
    """The test's body runs there. Its arguments are fixtures that JSON can say, and paths."""

    @pytest.mark.usefixtures("sglang")
    @functools.wraps(test)
    def outside(**fixtures: Any) -> None:
        assert running is not None
        given = {name: str(value) if isinstance(value, Path) else value for name, value in fixtures.items()}
        paths = [name for name, value in fixtures.items() if isinstance(value, Path)]
        running.run({"module": test.__module__, "test": test.__name__, "given": given, "paths": paths})

    return outside
