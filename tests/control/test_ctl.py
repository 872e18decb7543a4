"""Changes of a running cache through its control socket, as `tiercache ctl` and gateways make them."""

import asyncio
import sys
from pathlib import Path
from socket import AF_UNIX, socket

import pytest

from tests.control.conftest import CHUNKS, RANKS, TOKENS, config_of
from tiercache import TierCache
from tiercache.cli import app
from tiercache.control.client import Fleet, ask
from tiercache.control.messages import ControlError, Reconfigure

Captured = pytest.CaptureFixture[str]


async def run(*words: str) -> int:
    """Run the command as it is typed, and return its exit status."""
    return await asyncio.to_thread(app, words, standalone_mode=False)


async def ctl(place: Path, *words: str) -> int:
    return await run("ctl", "--socket", str(place), *words)


async def test_a_limit_is_set_and_what_is_wrong_is_said(cache: TierCache, place: Path, capsys: Captured) -> None:
    assert await ctl(place, "set", "max_local_disk_size=0.05", "queue_wait_s=0.5") == 0
    assert capsys.readouterr().out == "max_local_disk_size: 0.1 -> 0.05\nqueue_wait_s: 1.0 -> 0.5\n"
    assert cache.config.max_local_disk_size == 0.05
    assert await ctl(place, "set", "max_local_disk_size=0.05") == 0
    assert capsys.readouterr().out == "done\n"
    assert await ctl(place, "set", "max_local_cpu_size=1", "max_local_disk_size=0.1") == 1
    assert "max_local_cpu_size: expected at most" in capsys.readouterr().err
    assert await ctl(place, "set", "control_socket=/elsewhere") == 1
    assert "needs a restart, so nothing was changed: control_socket" in capsys.readouterr().err
    assert cache.config.max_local_disk_size == 0.05
    assert await ctl(place, "reload") == 1
    assert "came from no file" in capsys.readouterr().err


async def test_a_tier_is_detached_and_attached(cache: TierCache, place: Path, capsys: Captured) -> None:
    assert await ctl(place, "detach", "disk") == 0
    assert (await cache.lookup(TOKENS)).chunks == 0
    assert await ctl(place, "attach", "disk") == 0
    assert (await cache.lookup(TOKENS)).chunks == CHUNKS
    assert capsys.readouterr().out == "done\ndone\n"
    assert await ctl(place, "detach", "tape") == 1
    assert "tape: there is no such tier below the hot cache; expected one of: disk" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["set"], ["set", "k", "pw-3f"], ["set", "k=pw-3f", "x"], ["set", "=1"], ["reload", "x"], ["detach"], ["stop"]],
)
async def test_a_wrong_command_line_says_what_is_expected(words: list[str], tmp_path: Path, capsys: Captured) -> None:
    assert await ctl(tmp_path / "none", *words) == 2
    said = capsys.readouterr().err
    assert "error: expected set KEY=VALUE ..., reload, detach TIER or attach TIER" in said and "pw-3f" not in said


async def test_each_rank_changes_and_the_ones_that_refuse_are_named(tmp_path: Path, capsys: Captured) -> None:
    larger = config_of(tmp_path).changed({"max_local_cpu_size": 0.006})
    async with TierCache.open(larger, RANKS[0]) as one, TierCache.open(config_of(tmp_path), RANKS[1]) as other:
        assert await ctl(tmp_path / "c.sock", "set", "max_local_disk_size=0.05") == 0
        assert one.config.max_local_disk_size == other.config.max_local_disk_size == 0.05
        await one.detach("disk")
        assert await ctl(tmp_path / "c.sock", "attach", "disk") == 0
        assert one.statistics().breakers == other.statistics().breakers == {"disk": "closed"}
        capsys.readouterr()
        assert await ctl(tmp_path / "c.sock", "set", "max_local_cpu_size=0.005") == 1
        said = capsys.readouterr()
        assert said.out == "max_local_cpu_size: 0.006 -> 0.005\n"
        assert said.err.startswith(f"error: {tmp_path / 'c.sock.1'}: max_local_cpu_size: expected at most")


async def test_what_any_rank_changes_and_why_each_refuses_is_printed(tmp_path: Path, capsys: Captured) -> None:
    places = [tmp_path / "c.sock.0", tmp_path / "c.sock.1"]
    async with TierCache.open(config_of(tmp_path), RANKS[0]), TierCache.open(config_of(tmp_path), RANKS[1]):
        assert await ctl(places[0], "set", "max_local_disk_size=0.05") == 0
        capsys.readouterr()
        assert await ctl(tmp_path / "c.sock", "set", "max_local_disk_size=0.05") == 0
        assert capsys.readouterr().out == "max_local_disk_size: 0.1 -> 0.05\n"
        assert await ctl(places[0], "set", "max_local_disk_size=0.06") == 0
        answer = await Fleet([tmp_path / "c.sock"]).ask(Reconfigure(changes={"max_local_disk_size": 0.06}))
        assert answer == {"changed": ["max_local_disk_size: 0.05 -> 0.06"]}
        capsys.readouterr()
        assert await ctl(tmp_path / "c.sock", "set", "chunk_size=16") == 1
        said = capsys.readouterr().err.splitlines()
        assert [line.partition(": needs a restart")[0] for line in said] == [f"error: {place}" for place in places]


@pytest.mark.parametrize("command", [["ctl", "set", "queue_wait_s=0.5"], ["advise"], ["top", "--once"]])
async def test_a_socket_that_is_not_there_or_whose_cache_was_killed_is_named_beside_one_that_is(
    cache: TierCache, place: Path, tmp_path: Path, capsys: Captured, command: list[str]
) -> None:
    missing = tmp_path / "misspelt.sock"
    words = [*command, "--socket", str(missing)]
    assert await run(*words, "--socket", str(place)) == 1
    said = capsys.readouterr()
    assert f"error: {missing}: no cache has a socket open there" in said.err
    assert said.out
    assert await run(*words) == 2
    assert f"error: no cache has a socket open at {missing}: is control_socket set there?" in capsys.readouterr().err
    with socket(AF_UNIX) as killed:
        killed.bind(str(missing))
    assert await run(*words, "--socket", str(place)) == 1
    assert await run(*words) == 2
    said = capsys.readouterr()
    assert (said.out + said.err).count("no cache answers there") == 2


async def test_a_key_that_is_given_twice_is_refused(cache: TierCache, place: Path, capsys: Captured) -> None:
    assert await ctl(place, "set", "max_local_disk_size=0.05", "max_local_disk_size=0.06") == 2
    assert "max_local_disk_size is given twice" in capsys.readouterr().err
    assert cache.config.max_local_disk_size == 0.1


async def test_a_cache_that_does_not_answer_may_still_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.control.client.ANSWER_S", 0.0)
    monkeypatch.setattr("tiercache.control.client._MARGIN_S", 0.05)
    with socket(AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / "c.sock"))
        frozen.listen()
        with pytest.raises(ControlError, match="does not answer in time, and may still do what was asked") as refused:
            await ask(tmp_path / "c.sock", Reconfigure(changes={"queue_wait_s": 1}, until_s=0.05))
    assert refused.value.kind == "late"


async def test_no_message_imports_a_module_or_leads_elsewhere(cache: TierCache, place: Path) -> None:
    plugin = "remote_storage_plugin.own"
    own = {"remote_storage_plugins": "own", f"{plugin}.module_path": "antigravity", f"{plugin}.class_name": "X"}
    for changes in (own, {"local_disk": "/elsewhere"}, {"remote_url": "redis://elsewhere"}):
        with pytest.raises(ControlError, match="needs a restart, so nothing was changed"):
            await ask(place, Reconfigure(changes=dict(changes)))
    assert "antigravity" not in sys.modules


async def test_no_answer_tells_a_secret(cache: TierCache, place: Path) -> None:
    for changes in ({"tenant_salt": "salt-3f"}, {"remote_url": "redis://:pw-3f@h"}, {"remote_url": "x://:pw-3f@h:1"}):
        with pytest.raises(ControlError) as refused:
            await ask(place, Reconfigure(changes=changes))
        assert "-3f" not in str(refused.value)
