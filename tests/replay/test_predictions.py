"""What the sample predicts of other sizes is what the simulator finds, from a trace and from a real cache that plays it."""

from pathlib import Path

import pytest

from tests.replay.predictions import predictions
from tiercache import Config, Layout, TierCache
from tiercache.replay.formats import Trace
from tiercache.replay.real.contents import Contents, Renamed
from tiercache.replay.real.serial import play
from tiercache.replay.setting import Setting
from tiercache.replay.simulator import Simulator

EXCERPT = Path(__file__).parent / "excerpts" / "mooncake_conversation.jsonl"
BLOCK_BYTES = 4096


async def test_the_live_sample_predicts_what_replay_simulates_at_each_size() -> None:
    requests = list(Renamed(Trace(EXCERPT, strict=True)))
    config = Config(max_local_cpu_size=1 / 1024, device="none")
    async with TierCache.open(config, Layout("replay", chunk_tokens=1, bytes_per_token=BLOCK_BYTES)) as cache:
        contents = Contents(BLOCK_BYTES)
        for request in requests:
            await play(cache, contents, request)
        usage = cache.statistics().advice.usage
    for size, tokens in usage.hit_tokens.items():
        simulated = Simulator(Setting(int(size) // BLOCK_BYTES), 1).run(requests)
        assert tokens / usage.sampled_tokens == pytest.approx(simulated.hit, abs=0.02), size


def test_predictions_of_a_trace() -> None:
    for part, (simulated, predicted) in predictions(EXCERPT).items():
        assert predicted == pytest.approx(simulated, abs=0.02), part
