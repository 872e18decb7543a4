"""What clients of the control socket may take of the process that the cache lives in: of its loop, memory, descriptors."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.tiers.others import running
from tiercache.control import server
from tiercache.control.client import ask
from tiercache.control.messages import LARGEST_MESSAGE_BYTES, Lookup, Statistics

LONGEST_S = 0.05
"""A step takes 5 ms, on a machine that has nothing else to do; 0.2 to 3 s it was."""
FLOOD = Path(__file__).with_name("flood.py")
pytestmark = pytest.mark.usefixtures("cache")


class Rounds:
    """The longest round of the running loop, in seconds of processor time: another process's load is not ours."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._before_s = time.thread_time()
        self._handle = self._loop.call_soon(self._beat)

    def _beat(self) -> None:
        now_s = time.thread_time()
        self.longest_s = max(self.longest_s, now_s - self._before_s)
        self._before_s = now_s
        self._handle = self._loop.call_soon(self._beat)

    def stop(self) -> float:
        self._handle.cancel()
        return self.longest_s


@pytest.mark.parametrize(
    ("what", "connections", "times"),
    [
        *(("statistics", 1, 2000), ("statistics", 60, 100), ("lookup-tokens", 6, 1)),
        *((f"lookup-{largest}", 1, 1) for largest in ("tokens", "small", "nested", "keys")),
        *((f"{command}-keys", 1, 1) for command in ("pin", "unpin")),
    ],
)
async def test_messages_that_are_many_or_large_take_a_short_step_a_round(
    place: Path, what: str, connections: int, times: int
) -> None:
    async with running(FLOOD, place, what, connections, times) as flood, asyncio.timeout(120):
        flood.say("begin")
        rounds = Rounds()
        assert await flood.line() == "answered"
        longest_s = rounds.stop()
    assert longest_s < LONGEST_S


async def test_who_asks_and_never_reads_keeps_no_descriptor(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_TAKEN_S", 0.05)
    before = len(os.listdir("/proc/self/fd"))
    async with running(FLOOD, place, "statistics", 150, 0) as flood, asyncio.timeout(120):
        assert await flood.do("begin") == "asked"
        async with asyncio.timeout(30):
            # The clients are still there, and still do not read.
            while len(os.listdir("/proc/self/fd")) > before + 8:
                await asyncio.sleep(0)
        assert (await ask(place, Statistics()))["rank"] == 0


@pytest.mark.parametrize("sent", [b"\x82\xa7command", b"\x01" * (65 << 10)], ids=["10 bytes", "65 KiB"])
async def test_messages_that_are_announced_and_not_sent_take_nobodys_room(place: Path, sent: bytes) -> None:
    silent = [await asyncio.open_unix_connection(str(place)) for _ in range(32)]
    for _, writer in silent:
        writer.write(LARGEST_MESSAGE_BYTES.to_bytes(4, "big") + sent)
        await writer.drain()
    async with asyncio.timeout(8):
        answer = await ask(place, Lookup(tokens=list(range(30_000))))
    assert answer["asked"] == 30_000 // 16
    for _, writer in silent:
        writer.close()
