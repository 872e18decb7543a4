"""The campaign as it is: it kills, it ends, nothing is found and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.torture.campaign.command import run_campaign
from tests.torture.campaign.plan import PARTS, PLACES
from tests.torture.campaign.usage import left_behind
from tiercache.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.uses("redis-server", "fuse3")
def test_all_parts_survive_a_short_campaign(short_path: Path) -> None:
    report = run_campaign(short_path, 25 / 60, 7)
    said = "\n".join(report.lines())
    assert not report.failed, said
    assert not report.interrupted
    assert report.kills >= 10, said
    assert sum(report.operations.values()) > 100, said
    assert report.promises and report.verified and report.damage_found, said
    played = {place for part in PARTS for place in PLACES[part]} - report.skipped.keys()
    assert set(report.recoveries_s) == played, said
    assert not report.directory.exists(), "of a campaign that found nothing nothing is kept"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_campaign_ends_soon_and_leaves_nothing(short_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.torture.campaign", str(short_path), "--minutes", "10", "--seed", "3"]
    campaign = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    while not list(short_path.glob("campaign-3-*/disk/chunks/tiercache-chunks/??")):  # at work
        assert campaign.poll() is None
        time.sleep(0.05)
    os.kill(campaign.pid, number)
    said, _ = campaign.communicate(timeout=60)
    assert campaign.returncode == 130, said
    assert "interrupted" in said
    assert not list(short_path.iterdir())
    assert not left_behind(short_path)
    assert not processes_of(short_path)


def test_killed_campaign_takes_its_workers_with_it(short_path: Path) -> None:
    command = [sys.executable, "-m", "tests.torture.campaign", str(short_path), "--minutes", "10", "--parts", "disk"]
    campaign = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    while not list(short_path.glob("campaign-*/disk/chunks/tiercache-chunks/??")):
        assert campaign.poll() is None
        time.sleep(0.05)
    campaign.kill()
    campaign.wait()
    until_s = time.monotonic() + 20
    while processes_of(short_path) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not processes_of(short_path)


def test_unknown_part_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parts: expected some of disk, fs, full, redis, hf3fs, found 'tape'"):
        run_campaign(tmp_path, 1.0, 1, ("tape",))


def processes_of(directory: Path) -> list[str]:
    """Return the processes that have a file below `directory` open."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(f"{directory}/"):
            found.append(f"{entry} -> {target}")
    return found
