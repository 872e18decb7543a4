"""`python -m tiercache.demo` as its user sees it: exit status, messages, files, and nothing left running.

The engine is a stand-in: a server that speaks vLLM's protocol and logs the connector's lines. With the real one the demo
runs in `tests/readme/test_makefile.py`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.demo.conftest import REPOSITORY

STAND_IN = Path(__file__).with_name("stand_in")
START_S = 60.0


def start(workplace: Path, fault: str | None, **environment: str) -> subprocess.Popen[str]:
    paths = [REPOSITORY] if fault is None else [STAND_IN, REPOSITORY]
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "STAND_IN": fault or ""}
    command, pipes = [sys.executable, "-m", "tiercache.demo"], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = os.environ | environment
    return subprocess.Popen(command, cwd=workplace, env=environment, text=True, preexec_fn=hears_ctrl_c, **pipes)


def hears_ctrl_c() -> None:
    """Also where the tests run in the background of a shell, which has everything ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(workplace: Path, fault: str | None, **environment: str) -> tuple[int, str]:
    process = start(workplace, fault, **environment)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


def wait_until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < until, f"not within {START_S:.0f} s: {what}"
        time.sleep(0.02)


def left_running(workplace: Path) -> list[int]:
    """Those of the stand-in's processes that still run; a zombie does not."""
    found = []
    for pid in map(int, (workplace / "demo" / "processes").read_text().split()):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def test_a_good_run_writes_its_report_and_leaves_nothing_running(workplace: Path) -> None:
    """Settings and proxies of the user do not reach it, and KV of an earlier run is removed, so that cold is cold."""
    (workplace / "demo" / "kv").mkdir()
    (workplace / "demo" / "kv" / "chunk").touch()
    nowhere = "http://127.0.0.1:9"
    proxies = {"http_proxy": nowhere, "HTTP_PROXY": nowhere, "no_proxy": "", "NO_PROXY": ""}
    status, output = run(workplace, "nothing", **proxies, TIERCACHE_LOCAL_CPU="false", LMCACHE_CHUNK_SIZE="7")
    assert status == 0, output
    assert "Every cached answer is, to the letter" in output
    report = json.loads((workplace / "demo" / "ttft.json").read_text())
    assert report["same_text"] is True
    assert [(one["name"], one["hit_tokens"], one["tier"]) for one in report["runs"]] == [
        ("cold", 0, ""),
        ("cpu", 6016, "cpu"),
        ("disk_restart", 6016, "disk"),
        ("prefix_cache", 6016, "vllm"),
    ]
    assert (workplace / "demo" / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert left_running(workplace) == []


def test_a_different_answer_is_named_and_fails(workplace: Path) -> None:
    status, output = run(workplace, "answers_differently")
    assert status == 1
    assert "wrong: warm, disk after restart: answered 'A lie.'" in output
    assert "Every cached answer" not in output
    assert json.loads((workplace / "demo" / "ttft.json").read_text())["same_text"] is False


@pytest.mark.parametrize(
    ("fault", "message"), [("dies_at_start", "stand-in: no such model"), ("dies_when_asked", "stand-in: out of memory")]
)
def test_a_server_that_dies_is_reported_with_the_end_of_its_log(workplace: Path, fault: str, message: str) -> None:
    status, output = run(workplace, fault)
    assert status == 1
    assert message in output and "demo/server-1.log" in output
    assert "Traceback" not in output
    if fault == "dies_when_asked":
        assert left_running(workplace) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_it_stops_the_servers(workplace: Path, signum: signal.Signals) -> None:
    process = start(workplace, "hangs_when_asked")
    log = workplace / "demo" / "server-1.log"
    try:
        wait_until(lambda: log.exists() and "stand-in: hanging" in log.read_text(), "the long question is asked")
        process.send_signal(signum)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "no server is left running" in output
    assert left_running(workplace) == []
