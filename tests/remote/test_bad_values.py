"""Values that are no chunks: they are told apart, and removed from the server without anything that was stored meanwhile."""

import asyncio
import dataclasses

import numpy as np
import pytest

from tests.remote.test_registry import LAYOUT, settings_of
from tests.tiers.opened import open_tier
from tiercache.core.header import Header, payload_checksum
from tiercache.errors import CorruptChunk
from tiercache.testing import chunk
from tiercache.tiers.remote.base import NotOurs, RemoteTier

KEY, PADDED = chunk(1, 5000)


class Stepped(RemoteTier):
    """What a request does is done when it is let go on, in the order in which they are let."""

    def __init__(self) -> None:
        super().__init__(settings_of())
        self.value: bytes | None = b"TI"
        self.requests: asyncio.Queue[tuple[str, asyncio.Event]] = asyncio.Queue()

    async def _step(self, name: str) -> None:
        go_on = asyncio.Event()
        self.requests.put_nowait((name, go_on))
        await go_on.wait()

    def reading(self) -> asyncio.Task[int | None]:
        return asyncio.create_task(self.read(KEY, np.empty(8192, np.uint8)))

    def writing(self) -> asyncio.Task[bool]:
        return asyncio.create_task(self.write(KEY, PADDED, 5000))

    async def next(self, expected: str) -> asyncio.Event:
        async with asyncio.timeout(60):
            name, go_on = await self.requests.get()
        assert name == expected
        return go_on

    async def _connect(self) -> None: ...

    async def _disconnect(self) -> None: ...

    async def _get(self, key: bytes, into: np.ndarray) -> int | None:
        value = self.value
        await self._step("get")
        if value is None:
            return None
        payload = np.frombuffer(value, np.uint8)[88:]
        into[: payload.nbytes] = payload
        return self.verified(key, value[:88], into, payload.nbytes)

    async def _put(self, key: bytes, payload: np.ndarray) -> bool:
        await self._step("put")
        self.value = self.packed_header(key, payload) + payload.tobytes()
        return True

    async def _exist(self, keys: object) -> list[bool]:
        return [self.value is not None]

    async def _delete(self, key: bytes) -> bool:
        self.value = None
        await self._step("delete")
        return True


@pytest.mark.parametrize("write_ends", ["before the read", "after the read"])
async def test_what_is_stored_while_it_is_read_stays(write_ends: str) -> None:
    async with open_tier(Stepped()) as tier:
        read = tier.reading()
        (await tier.next("get")).set()
        second = await tier.next("get")
        write = tier.writing()
        put = await tier.next("put")
        if write_ends == "before the read":
            put.set()
            assert await write
        second.set()
        with pytest.raises(CorruptChunk):
            await read
        put.set()
        assert await write
        async with asyncio.timeout(60):
            assert await tier.write(KEY, PADDED, 5000), "what is known to be there is not sent again"
        assert tier.requests.empty(), "no removal"
        assert tier.contains(KEY) and tier.value is not None
        assert await tier.probe([KEY]) == 1


async def test_a_put_beside_a_removal_is_declined_and_a_second_one_stored() -> None:
    async with open_tier(Stepped()) as tier:
        reads = [tier.reading() for _ in range(2)]
        for _ in range(4):
            (await tier.next("get")).set()
        removal = await tier.next("delete")
        await asyncio.wait([reads[1]], timeout=60)
        assert tier.requests.empty(), "no second removal"
        assert not await tier.write(KEY, PADDED, 5000)
        removal.set()
        for read in reads:
            with pytest.raises(CorruptChunk):
                await read
        assert await tier.probe([KEY]) == 0
        write = tier.writing()
        (await tier.next("put")).set()
        assert await write
        assert tier.contains(KEY)


class SteppedLookups(Stepped):
    async def _exist(self, keys: object) -> list[bool]:
        found = await super()._exist(keys)
        await self._step("exist")
        return found


@pytest.mark.parametrize("lookup_ends", ["before the removal", "after the removal"])
async def test_a_lookup_beside_a_removal_leaves_nothing_known(lookup_ends: str) -> None:
    async with open_tier(SteppedLookups()) as tier:
        lookup = asyncio.create_task(tier.probe([KEY]))
        found = await tier.next("exist")
        removal = asyncio.create_task(tier.remove(KEY))
        removed = await tier.next("delete")
        first, second = ((found, lookup), (removed, removal))[:: 1 if lookup_ends == "before the removal" else -1]
        for step, task in (first, second):
            step.set()
            await task
        assert not tier.contains(KEY)
        write = tier.writing()
        (await tier.next("put")).set()
        assert await write
        assert tier.value is not None


async def test_a_read_beside_a_removal_leaves_nothing_known() -> None:
    async with open_tier(Stepped()) as tier:
        tier.value = HEADER.pack() + PADDED[:5000].tobytes()
        read = tier.reading()
        get = await tier.next("get")
        removal = asyncio.create_task(tier.remove(KEY))
        (await tier.next("delete")).set()
        assert await removal
        get.set()
        assert await read == 5000
        assert not tier.contains(KEY)


async def test_a_lookup_beside_a_read_does_not_report_a_bad_value() -> None:
    async with open_tier(SteppedLookups()) as tier:
        tier.writes = False
        lookup = asyncio.create_task(tier.probe([KEY]))
        found = await tier.next("exist")
        read = tier.reading()
        for _ in range(2):
            (await tier.next("get")).set()
        with pytest.raises(CorruptChunk):
            await read
        found.set()
        assert await lookup == 0
        async with asyncio.timeout(60):
            assert await tier.probe([KEY]) == 0, "the server is not asked again"


async def test_a_bad_value_that_is_gone_at_once_does_not_hide_the_next_one() -> None:
    async with open_tier(Stepped()) as tier:
        read = tier.reading()
        get = await tier.next("get")
        tier.value = None
        get.set()
        (await tier.next("get")).set()
        assert await read is None
        tier.value = b"of another process"
        assert await tier.probe([KEY]) == 1


class Undeletable(Stepped):
    async def _delete(self, key: bytes) -> bool:
        raise ConnectionResetError


async def test_a_bad_value_that_cannot_be_removed_is_corrupt_all_the_same() -> None:
    async with open_tier(Undeletable()) as tier:
        read = tier.reading()
        for _ in range(2):
            (await tier.next("get")).set()
        with pytest.raises(CorruptChunk):
            await read


# A value is a chunk only if everything in its header is right.

HEADER = Header(KEY, LAYOUT.fingerprint, 5000, payload_checksum(PADDED[:5000]))


def test_the_right_value_has_its_length() -> None:
    tier = Stepped()
    assert tier.packed_header(KEY, PADDED[:5000]) == HEADER.pack()
    assert tier.verified(KEY, HEADER.pack(), PADDED[:5000], 5000) == 5000


@pytest.mark.parametrize(
    ("raw", "got", "said"),
    [
        (dataclasses.replace(HEADER, key=chunk(2)[0]).pack(), 5000, "key"),
        (dataclasses.replace(HEADER, fingerprint=bytes(16)).pack(), 5000, "layout"),
        (dataclasses.replace(HEADER, payload_bytes=4999).pack(), 5000, "length: expected 4999 bytes, found 5000"),
        (dataclasses.replace(HEADER, payload_checksum=1).pack(), 5000, "payload checksum"),
        (HEADER.pack()[:70] + bytes([HEADER.pack()[70] ^ 1]) + HEADER.pack()[71:], 5000, "header checksum"),
        (HEADER.pack(), 4999, "length: expected 5000 bytes, found 4999"),
        *((HEADER.pack()[:left_bytes], 0, "header: expected 88 bytes") for left_bytes in (0, 3, 8, 87)),
    ],
)
def test_a_value_that_is_not_this_chunk_is_corrupt(raw: bytes, got: int, said: str) -> None:
    with pytest.raises(CorruptChunk, match=f"shelf: {said}") as caught:
        Stepped().verified(KEY, raw, PADDED[:5000], got)
    assert not isinstance(caught.value, NotOurs)


@pytest.mark.parametrize("raw", [b"hello", b"x" * 88, HEADER.pack()[1:]])
def test_a_value_that_is_no_chunk_is_not_ours(raw: bytes) -> None:
    with pytest.raises(NotOurs):
        Stepped().verified(KEY, raw, PADDED[:5000], 5000)
