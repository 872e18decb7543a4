"""Values that were damaged on the server or on the wire: one costs its own key and nothing else, and is replaced."""

import numpy as np
import pytest

from tests.remote.redis.servers import Server
from tests.remote.redis.tiers import opened
from tests.remote.redis.wire import relay_to
from tiercache import Config, Layout, TierCache
from tiercache.core.header import PACKED_BYTES
from tiercache.errors import CorruptChunk
from tiercache.testing.contract import chunk, page_aligned

pytestmark = pytest.mark.needs("redis-server")

LENGTH = 300_000


@pytest.mark.parametrize("times", [1, 2])
async def test_a_bit_that_flips_on_the_wire_costs_one_more_read(server: Server, times: int) -> None:
    """Two in a row look like a value that is damaged on the server."""
    key, payload = chunk(1, LENGTH)
    with relay_to(server.port) as relay, server.client() as client:
        async with opened(f"redis://127.0.0.1:{relay.port}") as tier:
            assert await tier.write(key, payload, LENGTH)
            there = client.dbsize()
            relay.flip_next(times)
            into = page_aligned(LENGTH)
            if times == 1:
                assert await tier.read(key, into) == LENGTH and np.array_equal(into[:LENGTH], payload[:LENGTH])
            else:
                with pytest.raises(CorruptChunk):
                    await tier.read(key, into)
            assert relay.flips == times
            assert client.dbsize() == (there if times == 1 else 0)
            assert (tier.statistics().read_again, tier.statistics().corrupt) == (1, times - 1)


async def test_damaged_values_do_not_open_the_breaker(server: Server) -> None:
    """In the cache: four values with one flipped bit, and all good chunks beside them are hits."""
    layout = Layout("m", chunk_tokens=64, bytes_per_token=4096)
    values = {
        "chunk_size": 64,
        "max_local_cpu_size": 0.02,
        "remote_storage_plugins": ["redis"],
        "remote_storage_plugin.redis.url": server.url,
        "remote_storage_plugin.redis.timeout_s": 1.0,
    }
    config = Config.load(environ={}, overrides=values)
    chunks = [chunk(number, layout.chunk_bytes) for number in range(1, 15)]
    async with TierCache.open(config, layout) as cache:
        assert await cache.put_many([key for key, _ in chunks], [payload for _, payload in chunks])
        assert (await cache.flush()).complete
    with server.client() as client:
        for key, _ in chunks[:4]:
            (name,) = client.keys(f"*:{key.hex()}")
            (byte,) = client.getrange(name, PACKED_BYTES + 9, PACKED_BYTES + 9)
            client.setrange(name, PACKED_BYTES + 9, bytes([byte ^ 0x80]))
    async with TierCache.open(config, layout) as cache:
        hits = []
        for key, _ in chunks:
            async with cache.get(key) as lease:
                hits.append(lease is not None)
        assert hits == [False] * 4 + [True] * 10
        assert all(str(state) == "closed" for state in cache.statistics().breakers.values())
