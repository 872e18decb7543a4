"""A trace played through a cache with memory and files: what the simulator says happens is what happens."""

from pathlib import Path

import pytest

from tiercache.replay.bounds import survey
from tiercache.replay.formats import Trace
from tiercache.replay.real.contents import Contents, Renamed
from tiercache.replay.real.place import opened
from tiercache.replay.real.serial import play_serial
from tiercache.replay.setting import Hardware, Setting

EXCERPTS = Path(__file__).parent / "excerpts"
CHUNK_BYTES = 4096


@pytest.mark.parametrize("policy", ["LRU", "COST"])
@pytest.mark.parametrize(
    ("name", "requests", "ram", "flash", "admission"),
    [
        ("mooncake_conversation", 60, 400, 500, "all"),
        ("agentic_coding", 30, 600, 700, "all"),
        ("agentic_coding", 30, 600, 700, "second_touch"),
        ("agentic_coding", 30, 300, 700, "all"),
    ],
)
async def test_the_cache_does_what_the_simulator_says(
    tmp_path: Path, name: str, requests: int, ram: int, flash: int, policy: str, admission: str
) -> None:
    trace = Trace(EXCERPTS / f"{name}.jsonl", limit=requests)
    known = survey(trace)
    assert known.unique_blocks is not None
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
