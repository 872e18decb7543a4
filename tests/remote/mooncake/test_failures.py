"""Masters and holders of memory that hang, die and come back; stores that are full."""

import asyncio
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.needs import takes_minutes
from tests.remote.arena import chunk, page_aligned
from tests.remote.mooncake.conftest import make_tier
from tests.remote.waiting import eventually
from tests.servers.mooncake import Holder, Master, running
from tests.tiers.opened import open_tier
from tiercache.bench.loop_figures import lags
from tiercache.errors import ConfigError, TierFull, TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.tiers.remote import mooncake as mooncake_module

pytestmark = pytest.mark.needs("libibverbs1")

KEY, PAYLOAD = chunk(1, 1 << 20)
LENGTH = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[Master, Holder]]:
    """One that a test may break."""
    with running(tmp_path) as store:
        yield store


async def test_a_master_that_is_down_at_the_start_is_used_when_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    master = Master(tmp_path)
    holder = Holder(tmp_path, master)
    tier = make_tier(master.url, chunk_bytes=LENGTH)
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(tier.open(), 60)
    assert "cannot be reached" in caplog.text
    try:
        for call in (tier.read(KEY, page_aligned(LENGTH)), tier.write(KEY, PAYLOAD, LENGTH), tier.probe([KEY])):
            with pytest.raises(TierUnavailable, match=str(master.port)):
                await call
        master.start()
        holder.start()
        assert await eventually(lambda: tier.write(KEY, PAYLOAD, LENGTH))
        assert await tier.read(KEY, page_aligned(LENGTH)) == LENGTH
    finally:
        await tier.close()
        holder.kill()
        master.kill()


async def test_a_master_that_dies_and_comes_back_is_a_failure_then_a_miss_then_well(
    store: tuple[Master, Holder],
) -> None:
    master, _ = store
    async with open_tier(make_tier(master.url, chunk_bytes=LENGTH)) as tier:
        assert await tier.write(KEY, PAYLOAD, LENGTH)
        master.kill()
        with pytest.raises(TierUnavailable):
            await tier.read(KEY, page_aligned(LENGTH))
        master.start()
        # It has forgotten everything; the holder gives its memory again without being asked.
        assert await eventually(lambda: tier.read(KEY, page_aligned(LENGTH))) is None
        assert await tier.probe([KEY]) == 0
        assert await eventually(lambda: tier.write(KEY, PAYLOAD, LENGTH))
        into = page_aligned(LENGTH)
        assert await tier.read(KEY, into) == LENGTH and np.array_equal(into, PAYLOAD)


async def test_a_frozen_master_costs_its_deadline_and_never_the_loop(store: tuple[Master, Holder]) -> None:
    master, _ = store
    tier = make_tier(master.url, chunk_bytes=LENGTH, timeout_s=1.0, concurrency=2)
    await tier.open()
    try:
        assert await tier.write(KEY, PAYLOAD, LENGTH)
        tier.known.clear()
        master.freeze()
        reads = [asyncio.create_task(tier.read(KEY, page_aligned(LENGTH))) for _ in range(2)]

        async def ask() -> None:
            for _ in range(2):
                with pytest.raises(TierUnavailable, match="does not answer"):
                    await tier.probe([KEY])

        began = time.monotonic()
        late_s = await lags(ask())
        assert time.monotonic() - began < 20.0
        assert late_s[len(late_s) // 2] < 0.05
        # Questions do not pile up behind the ones that hang.
        outcomes = await asyncio.gather(*(tier.probe([KEY]) for _ in range(30)), return_exceptions=True)
        assert all(isinstance(outcome, TierUnavailable) for outcome in outcomes)
        assert tier._control.unfinished <= 10
        master.thaw()
        assert await asyncio.gather(*reads) == [LENGTH, LENGTH]
        await eventually(lambda: tier.probe([KEY]), lambda found: found == 1)
    finally:
        master.thaw()
        await tier.close()


async def test_closing_does_not_wait_for_a_frozen_master(store: tuple[Master, Holder], tmp_path: Path) -> None:
    master, _ = store
    arena = Arena(ArenaSettings(size_bytes=4 << 20))
    arena.memory[:LENGTH] = PAYLOAD
    tier = make_tier(master.url, chunk_bytes=LENGTH)
    tier.use_arena(arena)
    await tier.open()
    assert await tier.write(KEY, arena.memory[:LENGTH], LENGTH)
    arena.memory[:] = 0
    master.freeze()
    read = asyncio.create_task(tier.read(KEY, arena.memory[LENGTH : 2 * LENGTH]))
    assert tier._client is not None
    session = tier._client._session
    assert session is not None
    while not session.users:
        await asyncio.sleep(0)
    began = time.monotonic()
    await tier.close()
    arena.close()
    assert time.monotonic() - began < 20.0
    assert not read.done()
    master.thaw()
    with pytest.raises(TierUnavailable, match="closed"):
        await read


async def test_lost_memory_is_a_failure_or_a_miss_and_other_memory_is_used(
    store: tuple[Master, Holder], tmp_path: Path
) -> None:
    master, holder = store
    async with open_tier(make_tier(master.url, chunk_bytes=LENGTH)) as tier:
        assert await tier.write(KEY, PAYLOAD, LENGTH)
        holder.kill()
        into = page_aligned(LENGTH)
        with pytest.raises(TierUnavailable):
            await tier.read(KEY, into)
        # Once the master has noticed:
        await eventually(lambda: tier.read(KEY, into), lambda found: found is None)
        with pytest.raises((TierFull, TierUnavailable)):
            await tier.write(KEY, PAYLOAD, LENGTH)
        holder.start()
        assert await eventually(lambda: tier.write(KEY, PAYLOAD, LENGTH))
        assert await tier.read(KEY, into) == LENGTH and np.array_equal(into, PAYLOAD)


async def test_a_full_store_says_so_and_takes_chunks_again(tmp_path: Path) -> None:
    with running(tmp_path, size_bytes=16 << 20, lease_ms=60_000) as (master, _):
        async with open_tier(make_tier(master.url, chunk_bytes=LENGTH)) as tier:
            written = []
            with pytest.raises(TierFull, match="-200"):
                for number in range(1, 40):
                    key, payload = chunk(number, LENGTH)
                    assert await tier.write(key, payload, LENGTH)
                    # A chunk that is read is not evicted during the master's lease.
                    assert await tier.read(key, page_aligned(LENGTH)) == LENGTH
                    written.append(key)
            assert 8 <= len(written) <= 16
            assert await tier.remove(written[0])
            assert await tier.write(*chunk(100, LENGTH), LENGTH)


async def test_memory_of_a_read_that_was_given_up_is_kept_until_the_client_is_left(
    store: tuple[Master, Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_module, "_GIVEN_UP_S", 0.0)
    master, holder = store
    async with open_tier(make_tier(master.url, chunk_bytes=LENGTH)) as tier:
        assert await tier.write(KEY, PAYLOAD, LENGTH)
        old = tier._client._session
        holder.kill()
        with pytest.raises(TierUnavailable):
            await tier.read(KEY, page_aligned(LENGTH))
        assert old.left.is_set() and old.users == 0
        holder.start()
        assert await eventually(lambda: tier.write(*chunk(2, LENGTH), LENGTH))
        assert tier._client._session is not old


@takes_minutes
async def test_bytes_that_trickle_in_after_mooncake_gave_up_reach_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake's own `get_into` returns after 60 s and goes on writing: tens of MiB, when this was written."""
    length = 120 << 20
    arena = Arena(ArenaSettings(size_bytes=2 * length))
    arena.memory[:length] = 7
    with running(tmp_path, size_bytes=512 << 20) as (master, holder):
        tier = make_tier(master.url, chunk_bytes=length)
        tier.use_arena(arena)
        await tier.open()
        try:
            assert await tier.write(KEY, arena.memory[:length], length)
            into = arena.memory[length:]
            into[:] = 0
            holder.freeze()
            read = asyncio.create_task(tier.read(KEY, into))
            process = holder.process
            assert process is not None
            while not read.done():
                process.send_signal(signal.SIGCONT)
                time.sleep(0.0002)
                process.send_signal(signal.SIGSTOP)
                await asyncio.wait([read], timeout=6)
            with pytest.raises(TierUnavailable):
                read.result()
            assert into.any(), "a part had arrived"
            into[:] = 0
            holder.thaw()
            # The master has forgotten the holder, which comes back as it did after other losses.
            assert await eventually(lambda: tier.write(*chunk(2, LENGTH), LENGTH))
            assert not into.any()
        finally:
            await tier.close()
            arena.close()


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("", {}, "mooncakestore://host:port"),
        ("redis://h:1", {}, "scheme 'redis'"),
        ("mooncakestore://h", {}, "host:port"),
        ("mooncakestore://h:1/?x=1", {}, "device"),
        ("", {"master_server_address": "nowhere"}, "host:port"),
        ("mooncakestore://h:1", {"config_file": "/nonexistent/m.json"}, "config_file.*cannot be read"),
    ],
)
async def test_a_wrong_place_is_said_at_the_start(url: str, options: dict[str, str], expected: str) -> None:
    tier = make_tier(url, **options)
    with pytest.raises(ConfigError, match=expected):
        await tier.open()
