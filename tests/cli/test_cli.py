"""The command line, run as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiercache import Config, Layout, TierCache

LAYOUT = Layout("cli", chunk_tokens=64, bytes_per_token=1024)


def tiercache(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tiercache.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    config = Config.load(
        environ={},
        overrides={"max_local_cpu_size": 0.01, "local_disk": str(tmp_path / "kv"), "max_local_disk_size": 0.1},
    )
    async with TierCache.open(config, LAYOUT) as cache:
        for number in range(6):
            await cache.put(number.to_bytes(24, "big"), np.full(LAYOUT.chunk_bytes, number, np.uint8))
    return tmp_path / "kv"


def test_help_and_version() -> None:
    assert tiercache("--version").stdout.strip() == "0.1.0"
    text = tiercache("--help").stdout
    assert all(command in text for command in ("doctor", "config", "stat", "verify", "bench"))


def test_stat_counts_by_layout(directory: Path) -> None:
    found = json.loads(tiercache("stat", directory, "--json").stdout)
    assert found["chunks"] == 6
    assert found["layouts"][LAYOUT.fingerprint.hex()]["payload_bytes"] == 6 * LAYOUT.chunk_bytes
    assert found["unreadable"] == []
    assert found["ledger_bytes"] >= found["occupied_bytes"] > 0
    assert "6 chunks" in tiercache("stat", directory).stdout


def test_verify_passes_what_is_whole_and_quarantines_what_is_not(directory: Path) -> None:
    whole = tiercache("verify", directory, "--json")
    assert (whole.returncode, json.loads(whole.stdout)["checked"]) == (0, 6)
    path = sorted(directory.glob("??/*"))[2]
    with path.open("r+b") as file:
        file.seek(4096 + 77)
        file.write(b"X")
    bad = tiercache("verify", directory, "--json")
    assert bad.returncode == 1
    (line,) = json.loads(bad.stdout)["bad"]
    assert path.name in line
    assert "payload checksum" in line
    assert not path.exists()
    assert tiercache("verify", directory).returncode == 0
    assert json.loads(tiercache("stat", directory, "--json").stdout)["quarantined"] == 1


@pytest.mark.parametrize("command", ["stat", "verify"])
def test_directory_that_is_not_ours_is_one_sentence(tmp_path: Path, command: str) -> None:
    for wrong in (tmp_path, tmp_path / "absent"):
        run = tiercache(command, wrong)
        assert run.returncode == 2
        assert run.stderr.startswith("error: ")
        assert len(run.stderr.splitlines()) == 1


def test_doctor_says_what_it_found_and_what_to_do(tmp_path: Path) -> None:
    findings = json.loads(tiercache("doctor", "--path", tmp_path, "--json").stdout)
    topics = {finding["topic"]: finding for finding in findings}
    assert topics[f"disk at {tmp_path}"]["status"] == "ok"
    assert {"O_DIRECT", "memlock limit", "transparent huge pages", "GPU", "3FS mount", "package uvloop"} <= set(topics)
    assert all(finding["advice"] for finding in findings if finding["status"] == "problem")
    missing = tiercache("doctor", "--path", tmp_path / "absent")
    assert missing.returncode == 1
    assert "not a directory" in missing.stdout


def test_config_explain_is_reachable(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 128\n")
    run = tiercache("config", "explain", file, "--json")
    assert run.returncode == 0, run.stderr
    assert "chunk_size" in run.stdout
    file.write_text("chunk_sise: 128\n")
    wrong = tiercache("config", "explain", file)
    assert wrong.returncode != 0
    assert "chunk_size" in wrong.stderr
