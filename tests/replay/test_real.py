"""A trace played through a cache with memory and files: what the simulator says happens is what happens."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.replay.test_command import EXCERPT, said
from tiercache.replay.bounds import survey
from tiercache.replay.formats import Trace
from tiercache.replay.real.calibration import Speeds
from tiercache.replay.real.contents import Contents, Renamed
from tiercache.replay.real.place import opened
from tiercache.replay.real.serial import play_serial
from tiercache.replay.real.timed import Player, compressed, simulate_timed
from tiercache.replay.setting import Hardware, Setting

EXCERPTS = Path(__file__).parent / "excerpts"
CHUNK_BYTES = 4096


@pytest.mark.parametrize("policy", ["LRU", "LFU"])
@pytest.mark.parametrize(
    ("name", "requests", "ram", "flash", "admission"),
    [
        ("mooncake_conversation", 60, 400, 500, "all"),
        ("agentic_coding", 24, 600, 700, "all"),
        ("agentic_coding", 24, 600, 700, "second_touch"),
        ("agentic_coding", 20, 300, 700, "all"),
    ],
)
async def test_the_cache_does_what_the_simulator_says(
    tmp_path: Path, name: str, requests: int, ram: int, flash: int, policy: str, admission: str
) -> None:
    trace = Trace(EXCERPTS / f"{name}.jsonl", limit=requests)
    known = survey(trace)
    setting = Setting(ram, flash, policy=policy, admission=admission, hardware=Hardware(CHUNK_BYTES // known.block_tokens))
    contents = Contents(CHUNK_BYTES)
    async with opened(setting, CHUNK_BYTES, known.unique_blocks, tmp_path, one_at_a_time=True) as cache:
        found = await play_serial(cache, contents, Renamed(trace), setting, known.block_tokens)
        statistics = cache.statistics()
    assert not found.differs
    assert found.measured == found.simulated
    assert (found.requests, found.blocks) == (known.requests, known.blocks)
    assert statistics.tiers["cpu"].evicted > 0
    assert statistics.tiers["disk"].evicted > 0


async def test_requests_that_overlap_are_all_answered_with_the_right_bytes(tmp_path: Path) -> None:
    """Of the times only what holds on any machine is asserted: nothing is quicker than computing."""
    trace = Trace(EXCERPTS / "agentic_coding.jsonl", limit=30)
    known = survey(trace)
    speeds = Speeds(ram_bytes_per_s=1e9, flash_bytes_per_s=1e8, flash_latency_s=1e-4)
    hardware = Hardware(CHUNK_BYTES // known.block_tokens)
    setting = compressed(Setting(1000, 1100, hardware=hardware), 500.0, speeds)
    requests = Renamed(trace, 500.0)
    contents = Contents(CHUNK_BYTES)
    async with opened(setting, CHUNK_BYTES, known.unique_blocks, tmp_path, one_at_a_time=False) as cache:
        found = await Player(cache, contents, setting, known.block_tokens).play(requests)
        assert not any(cache.cpu.budget.held)
    simulated = simulate_timed(requests, setting, known.block_tokens)
    assert (found.requests, found.blocks) == (simulated.requests, simulated.blocks) == (known.requests, known.blocks)
    assert not contents.wrong
    assert found.ram_blocks + found.flash_blocks <= found.blocks
    assert len(found.ttft_s) == known.requests
    computed_s = 1 / setting.hardware.prefill_tokens_per_s
    assert min(found.ttft_s) >= computed_s


def test_wrong_contents_are_noticed() -> None:
    contents = Contents(CHUNK_BYTES)
    one, other = bytes([1]) * 24, bytes([2]) * 24
    slot = np.zeros(CHUNK_BYTES, np.uint8)
    contents.source(one)(slot)
    contents.sink(one)(slot)
    assert not contents.wrong
    contents.sink(other)(slot)
    slot[-1] ^= 1
    contents.sink(one)(slot)
    assert contents.wrong == [other, one]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--sweep", "5%,10%"], "--real: expected one setting, found lists"),
        (["--real-chunk-kib", "6"], "--real-chunk-kib: expected a multiple of 4 KiB and of the 512 tokens of a block"),
        (["--real-chunk-kib", "4", "--sweep", "100"], "--real: expected at least 1024 KiB in RAM, found 400"),
        (["--flash", "all", "--prefetch", "hints"], "--real: expected --prefetch none, found hints"),
        (["--sweep", "2"], "--real: expected room for 4 blocks in RAM, found 2"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(tmp_path: Path, options: list[str], problem: str) -> None:
    assert problem in said(2, EXCERPT, "--real", tmp_path, *options)


def test_the_command_prints_both_sides_and_leaves_no_file(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    options = ["--limit", "30", "--sweep", "500", "--flash", "600", "--speed-up", "100"]
    options += ["--real", str(files), "--real-chunk-kib", "16", "--json", str(tmp_path / "rows.json")]
    assert "one by one: blocks hit in RAM" in said(0, EXCERPT, *options)
    (found,) = json.loads((tmp_path / "rows.json").read_text())
    serial = found["real"]["serial"]
    assert serial["measured"] == serial["simulated"]
    assert found["real"]["timed"]["measured"]["requests"] == 30
    assert not list(files.iterdir())
