"""The control socket of a real cache over a real disk tier."""

import asyncio
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.control.conftest import CHUNKS, LAYOUT, RANKS, TOKENS, config_of
from tests.control.flood import framed
from tiercache import Config, TierCache
from tiercache.control import handler, messages, server, sockets
from tiercache.control.client import ask, find_sockets
from tiercache.control.framing import receive
from tiercache.control.messages import LARGEST_MESSAGE_BYTES, ControlError
from tiercache.control.server import socket_path
from tiercache.errors import ConfigError


async def exchange(path: Path, raw: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(raw)
    try:
        return dict(msgspec.msgpack.decode(await receive(reader)))
    finally:
        writer.close()


@pytest.fixture
def forgets(cache: TierCache, monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """Those that have begun; none ever ends."""
    begun = asyncio.Semaphore(0)

    async def hang(*_: Any) -> None:
        begun.release()
        await asyncio.Event().wait()

    monkeypatch.setattr(cache, "forget", hang)
    return begun


async def test_pin_fetches_what_is_not_hot_and_keeps_it(cache: TierCache, place: Path) -> None:
    assert await ask(place, messages.Pin(tokens=TOKENS, until_s=20.0)) == {"asked": CHUNKS, "pinned": CHUNKS}
    found = await ask(place, messages.Statistics())
    assert (found["model"], found["rank"], found["held"], found["pinned"]) == ("m", 0, 0, CHUNKS)
    await ask(place, messages.Unpin(tokens=TOKENS))
    assert cache.ahead.pinned == 0


async def test_forgotten_prefix_is_in_no_tier(cache: TierCache, place: Path) -> None:
    await ask(place, messages.Pin(tokens=TOKENS, until_s=20.0))
    await ask(place, messages.Forget(tokens=TOKENS))
    assert (await ask(place, messages.Lookup(tokens=TOKENS)))["found"] == 0
    assert cache.ahead.pinned == 0


async def test_cancelled_prefetch_ends(tmp_path: Path, place: Path) -> None:
    async with TierCache.open(config_of(tmp_path, prefetch_share=0.0), LAYOUT) as idle:
        await idle.store(TOKENS, [b"x" * LAYOUT.chunk_bytes] * CHUNKS)
        await idle.flush()
        idle.clear_hot()
        begun = await ask(place, messages.Prefetch(tokens=TOKENS, handle="mine"))
        assert (begun["handle"], begun["done"]) == ("mine", False)
        with pytest.raises(ControlError, match="there is a prefetch 'mine' already"):
            await ask(place, messages.Prefetch(tokens=TOKENS, handle="mine"))
        waiting = asyncio.create_task(ask(place, messages.Progress(handle="mine", until_s=30.0)))
        await asyncio.sleep(0)
        assert (await ask(place, messages.Cancel(handle="mine")))["cancelled"] == CHUNKS
        assert (await waiting)["done"]


async def test_sessions_are_told_to_the_predictors(cache: TierCache, place: Path) -> None:
    assert await ask(place, messages.Began(session="s", tokens=TOKENS, step="plan")) == {"chunks": CHUNKS}
    assert await ask(place, messages.Ended(session="s", tokens=TOKENS, step="plan", kind="tool")) == {"chunks": CHUNKS}
    assert not cache.ahead.sessions.came_back("s"), "it had one turn"
    assert await ask(place, messages.Began(session="s", tokens=TOKENS)) == {"chunks": CHUNKS}
    assert cache.ahead.sessions.came_back("s"), "after the end of a turn another one has begun"
    assert await ask(place, messages.Over(session="s")) == {}
    assert len(cache.ahead.sessions) == 0


async def test_who_hangs_up_ends_nothing(cache: TierCache, place: Path) -> None:
    begun = await ask(place, messages.Prefetch(tokens=TOKENS))
    waiting = asyncio.create_task(ask(place, messages.Progress(handle=begun["handle"], until_s=30.0)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await ask(place, messages.Progress(handle=begun["handle"], until_s=20.0)))["promoted"] == CHUNKS


@pytest.mark.parametrize(
    ("raw", "kind", "says"),
    [
        (framed(7), "malformed", "Expected `object`, got `int`"),
        (framed({"command": "prefetsch"}), "malformed", "prefetsch"),
        (framed({"command": "prefetch"}), "malformed", "either tokens .* or keys .*, found neither"),
        (framed({"command": "prefetch", "tokens": [], "keys": []}), "malformed", "found both"),
        (framed({"command": "prefetch", "tokens": [1], "dead_line": 3}), "malformed", "dead_line"),
        (framed({"command": "prefetch", "tokens": [1], "deadline_s": float("nan")}), "malformed", "deadline_s"),
        (framed({"command": "lookup", "keys": ["ff"]}), "malformed", r"keys\[0\]"),
        (framed({"command": "progress", "handle": "none"}), "unknown", "no prefetch 'none'"),
        (framed({"command": "lookup", "tokens": [1], "lora": {"name": "a", "path": "/a"}}), "refused", "in vLLM only"),
        (b"\x00\x00\x00\x02\xc1\xc1", "malformed", "malformed message"),
        ((LARGEST_MESSAGE_BYTES + 1).to_bytes(4, "big"), "too_large", "at most"),
    ],
)
async def test_what_is_not_a_message_gets_a_sentence(
    cache: TierCache, place: Path, raw: bytes, kind: str, says: str
) -> None:
    answer = await exchange(place, raw)
    assert answer["error"]["kind"] == kind
    assert re.search(says, answer["error"]["message"])


async def test_tokens_with_a_salt_are_the_chunks_of_that_tenant(cache: TierCache, place: Path) -> None:
    keys = cache.keys(TOKENS, salt="tenant")
    await cache.put_many(keys[:2], [bytes(LAYOUT.chunk_bytes)] * 2)
    for question in (messages.Lookup(tokens=TOKENS, cache_salt="tenant"), messages.Lookup(keys=[key.hex() for key in keys])):
        assert (await ask(place, question))["found"] == 2


async def test_cache_without_a_hot_tier_refuses_to_prefetch(tmp_path: Path, place: Path) -> None:
    async with TierCache.open(config_of(tmp_path, local_cpu=False), LAYOUT):
        with pytest.raises(ControlError, match="local_cpu is false") as caught:
            await ask(place, messages.Prefetch(tokens=TOKENS))
        assert caught.value.kind == "refused"


async def test_only_its_user_may_open_the_socket(cache: TierCache, place: Path) -> None:
    assert stat.S_IMODE(place.stat().st_mode) == 0o600


async def test_second_cache_at_the_path_is_refused_and_the_first_one_answers_on(
    cache: TierCache, place: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="in use by another cache"):
        await TierCache(config_of(tmp_path), LAYOUT).start()
    assert (await ask(place, messages.Statistics()))["rank"] == 0


async def test_start_that_is_cancelled_at_its_last_step_leaves_the_path_to_the_next(tmp_path: Path, place: Path) -> None:
    cache = TierCache(config_of(tmp_path), LAYOUT)
    starting = asyncio.create_task(cache.start())
    while not place.is_socket():
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not place.exists()
    await cache.start()
    assert (await ask(place, messages.Statistics()))["rank"] == 0
    await cache.close()


async def test_what_a_dead_process_left_is_taken_over(tmp_path: Path, place: Path) -> None:
    sockets.bound(place).close()
    assert place.is_socket()
    with pytest.raises(ControlError, match="no cache answers there") as caught:
        await ask(place, messages.Statistics())
    assert caught.value.kind == "unreachable"
    async with TierCache.open(config_of(tmp_path), LAYOUT):
        assert (await ask(place, messages.Statistics()))["rank"] == 0


async def test_closed_cache_takes_its_socket_along_and_hangs_up(tmp_path: Path, place: Path) -> None:
    async with TierCache.open(config_of(tmp_path), LAYOUT):
        reader, writer = await asyncio.open_unix_connection(str(place))
        await ask(place, messages.Statistics())
    assert await reader.read() == b""
    writer.close()
    assert not place.exists()


async def test_wrong_place_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no socket can be made at"):
        await TierCache(replace(config_of(tmp_path), control_socket=str(tmp_path / "no" / "c.sock")), LAYOUT).start()
    for wrong in ("here.sock", "/" + "x" * 100):
        with pytest.raises(ConfigError, match="an absolute path of at most"):
            Config(control_socket=wrong)


async def test_file_that_is_no_socket_is_not_removed(tmp_path: Path, place: Path) -> None:
    place.write_text("somebody's")
    with pytest.raises(ConfigError, match="no socket can be made at .*: .* no socket"):
        await TierCache(config_of(tmp_path), LAYOUT).start()
    assert place.read_text() == "somebody's"


async def test_each_rank_has_a_socket(tmp_path: Path) -> None:
    async with TierCache.open(config_of(tmp_path), RANKS[0]), TierCache.open(config_of(tmp_path), RANKS[1]):
        found = find_sockets(tmp_path / "c.sock")
        assert [path.name for path in found] == ["c.sock.0", "c.sock.1"]
        assert [(await ask(path, messages.Statistics()))["rank"] for path in found] == [0, 1]
    assert socket_path("/x", (3, 4), (1, 2)) == Path("/x.3.1") and socket_path("/x", (0, 1)) == Path("/x")


async def test_too_many_connections_are_told_so(
    forgets: asyncio.Semaphore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 1)
    hung = asyncio.create_task(ask(place, messages.Forget(tokens=TOKENS)))
    await forgets.acquire()
    with pytest.raises(ControlError, match="open already") as caught:
        await ask(place, messages.Statistics())
    assert caught.value.kind == "busy"
    hung.cancel()


async def test_message_that_is_too_large_is_not_sent(cache: TierCache, place: Path) -> None:
    with pytest.raises(ControlError, match="at most") as caught:
        await ask(place, messages.Lookup(tokens=[2**31] * (LARGEST_MESSAGE_BYTES // 5 + 1)))
    assert caught.value.kind == "too_large"


async def test_silent_connection_is_closed(cache: TierCache, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_IDLE_S", 0.05)
    reader, writer = await asyncio.open_unix_connection(str(place))
    writer.write(b"\x00\x00")
    assert await reader.read() == b""
    writer.close()


@pytest.mark.usefixtures("forgets")
async def test_hung_tier_makes_an_answer_late_and_no_more(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as soon, pytest.raises(ControlError, match="may hang") as caught:
        soon.setattr(server, "ANSWER_S", 0.05)
        await ask(place, messages.Forget(tokens=TOKENS))
    assert caught.value.kind == "late"
    assert (await ask(place, messages.Lookup(tokens=TOKENS)))["found"] == CHUNKS


async def test_large_messages_that_wait_keep_no_other_from_its_answer(forgets: asyncio.Semaphore, place: Path) -> None:
    tokens = list(range(30_000))
    hung = [asyncio.create_task(ask(place, messages.Forget(tokens=tokens))) for _ in range(16)]
    for _ in hung:
        await forgets.acquire()
    async with asyncio.timeout(8):
        assert (await ask(place, messages.Lookup(tokens=tokens)))["asked"] == 30_000 // 16
    for task in hung:
        task.cancel()


async def test_handles_are_bounded(cache: TierCache, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_MOST_HANDLES", 2)
    for name in ("a", "b"):
        await ask(place, messages.Prefetch(tokens=TOKENS, handle=name))
        await ask(place, messages.Progress(handle=name, until_s=20.0))
    await ask(place, messages.Prefetch(tokens=TOKENS, handle="c"))
    with pytest.raises(ControlError, match="no prefetch 'a'"):
        await ask(place, messages.Progress(handle="a"))
    assert (await ask(place, messages.Progress(handle="b")))["done"]
