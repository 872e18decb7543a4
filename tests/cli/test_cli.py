"""The command line, run as a user runs it."""

import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import tiercache


def test_help_and_version() -> None:
    assert tiercache("--version").stdout.strip() == "0.1.0"
    text = tiercache("--help").stdout
    assert all(command in text for command in ("doctor", "config", "stat", "verify", "bench"))


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['tiercache', '--help']\n"
        "from tiercache.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('numpy', 'torch', 'asyncio.runners', 'tiercache.cache') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_output_to_a_full_device_is_one_sentence(directory: Path) -> None:
    command = [sys.executable, "-u", "-m", "tiercache", "verify", directory]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (run.returncode, run.stderr) == (2, "error: [Errno 28] No space left on device\n")


def test_a_working_directory_that_was_deleted_is_one_sentence(tmp_path: Path) -> None:
    command = ["bash", "-c", 'rmdir "$PWD"; exec "$@"', "-", sys.executable, "-m", "tiercache", "stat", "."]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stderr) == (2, "error: [Errno 2] No such file or directory\n")
