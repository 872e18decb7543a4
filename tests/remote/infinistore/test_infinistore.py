"""The InfiniStore tier, on a fake of the client's API (`fake.py`): it has not met a real server."""

import asyncio
import inspect
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.needs import RDMA_DEVICES
from tests.remote.arena import ARENA, chunk, page_aligned
from tests.remote.infinistore import fake
from tests.remote.made import configured
from tests.remote.waiting import eventually
from tests.tiers.opened import open_tier
from tiercache.core.keys import ChunkKey
from tiercache.errors import ConfigError, CorruptChunk, TierFull, TierUnavailable
from tiercache.testing import TierContract
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.base import Tier
from tiercache.tiers.remote.base import NotOurs
from tiercache.tiers.remote.infinistore import InfiniStoreTier

KEY, PAYLOAD = chunk(1)
NAME = f"tiercache:{KEY.hex()}"


def make_tier(url: str = "infinistore://127.0.0.1:22345", **settings: Any) -> InfiniStoreTier:
    tier = InfiniStoreTier(configured("infinistore", url, **settings))
    tier.use_arena(ARENA)
    return tier


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> fake.Server:
    monkeypatch.setattr(fake, "server", fake.Server())
    monkeypatch.setitem(sys.modules, "infinistore", fake)  # type: ignore[arg-type]
    return fake.server


@pytest.fixture
async def tier(server: fake.Server) -> AsyncIterator[InfiniStoreTier]:
    async with open_tier(make_tier()) as tier:
        yield tier


class TestOverRdma(TierContract):
    @pytest.fixture(autouse=True)
    def use(self, server: fake.Server) -> None:
        self.server = server

    async def make_tier(self, place: Path) -> Tier:
        return make_tier()

    async def damage(self, tier: Tier, key: ChunkKey) -> bool:
        value = bytearray(self.server.values[f"tiercache:{key.hex()}:payload"])
        value[17] ^= 1
        self.server.values[f"tiercache:{key.hex()}:payload"] = bytes(value)
        return True

    async def test_prefix_ends_at_the_first_gap(self, tier: Tier) -> None:
        """Of a batch with a gap the server may find only what lies before it: the test of the contract, less that."""
        keys = [chunk(number)[0] for number in range(1, 6)]
        for number in (1, 2):
            await tier.write(*chunk(number), CHUNK_BYTES)
        assert tier.prefix(keys) == 2
        assert await tier.probe(keys) == 2
        assert await tier.probe(keys[2:]) == 0


class TestOverTcp(TestOverRdma):
    async def make_tier(self, place: Path) -> Tier:
        return make_tier(connection_type="TCP")


async def test_slots_of_the_arena_are_registered_and_used_themselves(server: fake.Server) -> None:
    tier = make_tier()
    async with open_tier(tier):
        assert await tier.write(KEY, PAYLOAD, CHUNK_BYTES)
        into = page_aligned(CHUNK_BYTES)
        assert await tier.read(KEY, into) == CHUNK_BYTES and np.array_equal(into, PAYLOAD)
        assert (ARENA.address, ARENA.memory.nbytes) in server.connections[0].regions
        assert len(server.values[NAME]) == 88 and len(server.values[f"{NAME}:payload"]) == CHUNK_BYTES


async def test_keys_with_gaps_are_asked_for_by_themselves(tier: InfiniStoreTier) -> None:
    """By a process that stored none of them."""
    keys = [chunk(number)[0] for number in range(1, 16)]
    for number in (6, 9):
        assert await tier.write(*chunk(number), CHUNK_BYTES)
    async with open_tier(make_tier()) as other:
        assert await other.probe_each(keys) == [number in (6, 9) for number in range(1, 16)]


async def test_a_header_without_its_payload_is_a_miss(server: fake.Server, tier: InfiniStoreTier) -> None:
    assert await tier.write(KEY, PAYLOAD, 5000)
    del server.values[f"{NAME}:payload"]
    assert await tier.read(KEY, page_aligned(CHUNK_BYTES)) is None


async def test_a_connection_that_comes_up_after_the_close_is_closed(server: fake.Server) -> None:
    server.may_connect.clear()
    tier = make_tier(timeout_s=0.05)
    await tier.open()
    await tier.close()
    server.may_connect.set()
    (thread,) = [thread for thread in threading.enumerate() if "connect" in thread.name]
    await asyncio.to_thread(thread.join, 30)
    (connection,) = server.connections
    assert not connection.connected


async def test_another_chunks_header_does_not_pass(server: fake.Server, tier: InfiniStoreTier) -> None:
    assert await tier.write(KEY, PAYLOAD, 5000)
    stranger, payload = chunk(2)
    assert await tier.write(stranger, payload, 5000)
    server.values[NAME] = server.values[f"tiercache:{stranger.hex()}"]
    with pytest.raises(CorruptChunk):
        await tier.read(KEY, page_aligned(CHUNK_BYTES))
    assert NAME not in server.values and f"{NAME}:payload" not in server.values


async def test_the_value_of_another_program_is_left_alone(server: fake.Server, tier: InfiniStoreTier) -> None:
    server.values[NAME] = b"x" * 88
    with pytest.raises(NotOurs):
        await tier.read(KEY, page_aligned(CHUNK_BYTES))
    assert server.values[NAME] == b"x" * 88


@pytest.mark.parametrize("kind", ["RDMA", "TCP"])
@pytest.mark.parametrize("where", ["", ":payload"])
@pytest.mark.parametrize("change", ["cut", "longer", "empty", "a bit of the length"])
async def test_a_value_of_a_wrong_length_costs_its_key_and_is_stored_anew(
    server: fake.Server, kind: str, where: str, change: str
) -> None:
    async with open_tier(make_tier(connection_type=kind)) as tier:
        for number in (1, 2):
            key, payload = chunk(number)
            assert await tier.write(key, payload, 5000)
        value = bytearray(server.values[NAME + where])
        if change == "cut":
            del value[40:]
        elif change == "longer":
            value += b"more"
        elif change == "empty":
            value.clear()
        else:
            value[64] ^= 0x80
        server.values[NAME + where] = bytes(value)
        with pytest.raises(CorruptChunk):
            await tier.read(KEY, page_aligned(CHUNK_BYTES))
        assert len(server.connections) == 1 and server.connections[0].connected, "it is the value's fault"
        assert await tier.read(chunk(2)[0], page_aligned(CHUNK_BYTES)) == 5000
        assert await tier.write(KEY, PAYLOAD, 5000)
        assert await tier.read(KEY, page_aligned(CHUNK_BYTES)) == 5000


async def test_a_full_server_is_a_full_tier(server: fake.Server, tier: InfiniStoreTier) -> None:
    server.codes.append(507)
    with pytest.raises(TierFull):
        await tier.write(KEY, PAYLOAD, CHUNK_BYTES)
    assert await tier.write(KEY, PAYLOAD, CHUNK_BYTES)


async def test_a_transfer_that_hangs_closes_the_connection_and_a_new_one_is_made(server: fake.Server) -> None:
    async with open_tier(make_tier(timeout_s=1.0)) as tier:
        assert await tier.write(KEY, PAYLOAD, CHUNK_BYTES)
        server.hang = True
        outcomes = await asyncio.gather(
            *(tier.read(KEY, page_aligned(CHUNK_BYTES)) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(outcome, TierUnavailable) for outcome in outcomes)
        assert not server.connections[0].connected
        server.hang = False
        assert await eventually(lambda: tier.read(KEY, page_aligned(CHUNK_BYTES))) == CHUNK_BYTES
        assert len(server.connections) == 2


@pytest.mark.parametrize("way", ["read", "write"])
async def test_over_tcp_a_transfer_that_hangs_closes_the_connection_and_ends_with_its_call(
    server: fake.Server, way: str
) -> None:
    other, other_payload = chunk(2)
    async with open_tier(make_tier(timeout_s=0.3, connection_type="TCP")) as tier:
        assert await tier.write(KEY, PAYLOAD, CHUNK_BYTES)
        server.may_answer.clear()
        into = page_aligned(CHUNK_BYTES)
        transfer = tier.read(KEY, into) if way == "read" else tier.write(other, other_payload, CHUNK_BYTES)
        work = asyncio.create_task(transfer)
        async with asyncio.timeout(20):
            while len(server.connections) < 2:
                await asyncio.sleep(0)
        with pytest.raises(TierUnavailable, match=r"0\.3 s"):
            await tier.read(KEY, page_aligned(CHUNK_BYTES))  # it waits for the only thread, and its memory is free
        assert not server.connections[0].connected and not work.done()
        server.may_answer.set()
        with pytest.raises(TierUnavailable, match=r"0\.3 s"):
            await work
        assert not into.any()
        assert await eventually(lambda: tier.read(KEY, page_aligned(CHUNK_BYTES))) == CHUNK_BYTES
        assert len(server.connections) == 2


@pytest.mark.parametrize("earlier", ["a connection that works", "a connection that was closed"])
async def test_a_transfer_that_hangs_while_the_tier_closes_ends_after_its_connection(
    server: fake.Server, earlier: str
) -> None:
    tier = make_tier(timeout_s=0.3)
    await tier.open()
    assert await tier.write(KEY, PAYLOAD, CHUNK_BYTES)
    if earlier == "a connection that was closed":
        server.codes.append(-1)
        with pytest.raises(TierUnavailable):
            await tier.read(KEY, page_aligned(CHUNK_BYTES))
        await eventually(lambda: tier.probe([chunk(2)[0]]))
    server.hang = True
    server.may_close.clear()
    connection = server.connections[-1]
    reading = asyncio.create_task(tier.read(KEY, page_aligned(CHUNK_BYTES)))
    async with asyncio.timeout(20):
        while not connection.held:
            await asyncio.sleep(0)
    await tier.close()
    assert connection.connected and not reading.done(), reading
    server.may_close.set()
    with pytest.raises(TierUnavailable):
        await reading
    assert not connection.connected


async def test_a_server_that_is_down_at_the_start_is_used_when_it_comes(
    server: fake.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercache.tiers.remote.infinistore._AGAIN_S", 0.01)
    server.down = True
    async with open_tier(make_tier(timeout_s=1.0)) as tier:
        for call in (tier.read(KEY, page_aligned(CHUNK_BYTES)), tier.write(KEY, PAYLOAD, 10), tier.probe([KEY])):
            with pytest.raises(TierUnavailable):
                await call
        server.down = False
        await eventually(lambda: tier.probe([KEY]))
        assert await tier.write(KEY, PAYLOAD, CHUNK_BYTES)
        server.down = True
        tier.known.clear()
        with pytest.raises(TierUnavailable):
            await tier.probe([KEY])
        server.down = False
        assert await eventually(lambda: tier.read(KEY, page_aligned(CHUNK_BYTES))) == CHUNK_BYTES


@pytest.mark.parametrize("url", ["", "redis://h:1", "infinistore://", "infinistore://a:1,b:2", "infinistore://h:x"])
def test_a_wrong_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        make_tier(url)


@pytest.mark.needs("libibverbs1")
@pytest.mark.parametrize(
    "method",
    [
        *("connect", "close", "register_mr", "rdma_write_cache_async", "rdma_read_cache_async", "tcp_read_cache"),
        *("tcp_write_cache", "check_exist", "get_match_last_index", "delete_keys"),
    ],
)
def test_the_fake_has_the_signatures_of_the_real_module(method: str) -> None:
    import infinistore as real

    theirs = inspect.getattr_static(real.InfinityConnection, method)
    theirs = getattr(theirs, "func", theirs)  # register_mr is a singledispatchmethod
    ours = getattr(fake.InfinityConnection, method)
    assert [(p.name, p.kind, p.default) for p in inspect.signature(theirs).parameters.values()] == [
        (p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values()
    ]
    assert inspect.iscoroutinefunction(theirs) is inspect.iscoroutinefunction(ours)


@pytest.mark.needs("libibverbs1")
def test_the_fake_has_the_constants_of_the_real_module() -> None:
    import infinistore as real

    for name in ("TYPE_RDMA", "TYPE_TCP", "LINK_ETHERNET", "LINK_IB"):
        assert getattr(real, name) == getattr(fake, name)
    assert issubclass(real.InfiniStoreKeyNotFound, real.InfiniStoreException)
    config = real.ClientConfig(
        host_addr="h", service_port=1, connection_type="RDMA", ib_port=1, link_type="Ethernet", dev_name="d"
    )
    config.verify()


@pytest.mark.needs("libibverbs1", "RDMA")
async def test_on_a_real_server(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "infinistore.server", "--service-port", "22345", "--manage-port", "22346"),
            *("--prealloc-size", "1", "--dev-name", RDMA_DEVICES[0], "--link-type", "Ethernet", "--host", "127.0.0.1"),
            stdout=log,
            stderr=log,
        )
    tier = make_tier(device_name=RDMA_DEVICES[0])
    try:
        await tier.open()
        await eventually(lambda: tier.probe([KEY]))
        assert await tier.write(KEY, PAYLOAD, CHUNK_BYTES)
        into = page_aligned(CHUNK_BYTES)
        assert await tier.read(KEY, into) == CHUNK_BYTES and np.array_equal(into, PAYLOAD)
        assert await tier.remove(KEY)
    finally:
        await tier.close()
        process.kill()
        await process.wait()
