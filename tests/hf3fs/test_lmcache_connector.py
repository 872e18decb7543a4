"""LMCache's 3FS connector, from its wheel and unchanged, on the emulator: this speaks the real API, and not only ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hf3fs_emulator import Hf3fsEmulator
from tests.needs import needs_fuse


@pytest.mark.parametrize(("kind", "mode"), [pytest.param("fuse", "plugin", marks=needs_fuse), ("directory", "url")])
def test_lmcache_connector_runs_on_the_emulator(kind: str, mode: str) -> None:
    with Hf3fsEmulator(fuse=kind == "fuse") as emulator:
        process = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("lmcache_drive.py")), str(emulator.mount), mode],
            env={**os.environ, **emulator.environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
        answer = json.loads(process.stdout.splitlines()[-1])
        assert (answer["missing"], answer["present"], answer["equal"]) == (True, True, True)
        assert answer["removed"] == [True, False]
        assert answer["files"] == 11
        assert answer["smallest_bytes"] >= answer["payload_bytes"]
        emulator.control.until_open_files(0)
        emulator.control.until_registered(buffers=0, rings=0)
        assert emulator.control.statistics().transferred_bytes >= 24 * answer["payload_bytes"]
