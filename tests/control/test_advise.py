"""`tiercache advise`, and the same figures over the control socket, HTTP and /metrics."""

import asyncio
import json
from pathlib import Path

import httpx

from tests.cli.conftest import tiercache
from tests.control.conftest import CHUNKS, LAYOUT, TOKENS, config_of
from tiercache import TierCache
from tiercache.control.client import Fleet, ask
from tiercache.control.families import figures_of
from tiercache.control.http import make_app
from tiercache.control.messages import Advise, Lookup
from tiercache.control.metrics import exposition


async def run(*arguments: object) -> tuple[int, str, str]:
    done = await asyncio.to_thread(tiercache, "advise", *arguments)
    return done.returncode, done.stdout, done.stderr


async def test_the_command_shows_curves_reasons_and_sentences(cache: TierCache, place: Path, tmp_path: Path) -> None:
    for _ in range(60):
        await cache.lookup(TOKENS)
        await cache.lookup([7, *TOKENS])
    picture = tmp_path / "curves.png"
    status, out, err = await run("--socket", place, "--plot", picture)
    assert (status, err) == (0, "")
    assert f"120 requests for {120 * len(TOKENS):,} tokens, 50.0 % found" in out
    assert "never_stored" in out and "disk" in out
    assert "of misses are asked for the first time: no cache of any size has those." in out
    assert picture.read_bytes().startswith(b"\x89PNG")


async def test_json_has_the_figures_of_every_socket(cache: TierCache, place: Path) -> None:
    await cache.lookup(TOKENS)
    status, out, _ = await run("--socket", place, "--json")
    (answer,) = json.loads(out).values()
    assert status == 0
    assert answer["advice"]["usage"]["asked_tokens"] == len(TOKENS)
    assert answer["sentences"] == ["1 requests so far: too few for advice, which begins at 100."]


async def test_sockets_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    sockets = {str(place / "c.sock") for place in places}
    async with TierCache.open(config_of(places[0]), LAYOUT), TierCache.open(config_of(places[1]), LAYOUT):
        words = [word for socket in sockets for word in ("--socket", socket)]
        status, out, _ = await run(*words, "--json")
        assert status == 0
        assert json.loads(out).keys() == sockets
        transport = httpx.ASGITransport(make_app(Fleet([Path(socket) for socket in sockets]), None))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/v1/statistics")).json().keys() == sockets
            text = (await client.get("/metrics")).text
    for socket in sockets:
        assert text.count(f'tiercache_up{{socket="{socket}"}} 1.0') == 1


async def test_lookups_of_a_gateway_are_not_requests(cache: TierCache, place: Path) -> None:
    assert (await ask(place, Lookup(tokens=TOKENS)))["found"] == CHUNKS
    assert (await ask(place, Advise()))["advice"]["requests"] == 0


async def test_metrics_have_the_same_figures(cache: TierCache, place: Path) -> None:
    await cache.lookup(TOKENS)
    await cache.lookup([7, *TOKENS])
    text = exposition({"c.sock": figures_of(cache)}).decode()
    usage = cache.statistics().advice.usage
    assert f'tiercache_asked_tokens_total{{socket="c.sock"}} {float(usage.asked_tokens)}' in text
    missed = float(usage.missed_tokens["never_stored"])
    assert f'tiercache_missed_tokens_total{{reason="never_stored",socket="c.sock"}} {missed}' in text
    size, tokens = next(iter(usage.hit_tokens.items()))
    assert f'tiercache_predicted_hit_tokens_total{{size="{size}",socket="c.sock"}} {tokens}' in text
