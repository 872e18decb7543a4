"""examples/kv_events_router.py: what it makes of events, and two real engines behind it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.examples import EXAMPLES, load_example
from tests.needs import takes_minutes
from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, running_example
from tiercache.demo.server import MODEL_NAME, Server, quickest_dtype, serving


@pytest.fixture(scope="module")
def example() -> Any:
    return load_example("kv_events_router")


def stored(*blocks: int, medium: str = "CPU", before: int | None = None) -> dict[str, Any]:
    """Of two tokens each, which are the block's number twice."""
    return {
        "type": "BlockStored",
        "block_hashes": list(blocks),
        "parent_block_hash": before,
        "token_ids": [token for block in blocks for token in (block, block)],
        "block_size": 2,
        "medium": medium,
    }


def removed(*blocks: int, medium: str = "CPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": medium}


PROMPT = [1, 1, 2, 2, 3, 3, 4]


def test_router_counts_on_a_prefix_in_the_engine_or_in_tiers(example: Any) -> None:
    engine = example.Engine("", "")
    assert engine.holds(PROMPT) == 0
    engine.follow(0, [stored(1), stored(2, 3, before=1, medium="STORAGE")])
    assert engine.holds(PROMPT) == 6
    assert engine.holds([]) == 0
    assert engine.holds(PROMPT[:6]) == 4, "the last token is computed"
    assert engine.holds([1, 1, 3, 3, 4]) == 2
    engine.follow(1, [removed(1)])
    assert engine.holds(PROMPT) == 0
    engine.follow(2, [stored(1, 2, medium="GPU")])
    assert engine.holds(PROMPT) == 4, "not what follows it in a tier: a hit there begins at the first chunk"


def test_router_that_missed_a_batch_begins_anew(example: Any) -> None:
    engine = example.Engine("", "")
    engine.follow(7, [stored(1)])
    assert engine.holds(PROMPT) == 2
    engine.follow(8, [stored(2, before=1)])
    assert engine.holds(PROMPT) == 4
    engine.follow(10, [stored(3, before=2)])
    assert engine.holds(PROMPT) == 0
    engine.follow(11, [stored(1), {"type": "AllBlocksCleared"}])
    assert engine.holds(PROMPT) == 0


CONFIG = """\
chunk_size: {chunk}
save_unfull_chunk: false
max_local_cpu_size: 0.012
local_disk: {place}/kv
max_local_disk_size: {disk_gb}
"""
CONVERSATIONS, PROMPT_TOKENS, REQUESTS, AT_ONCE = 100, 133, 500, 4
DISK_GB = 0.045 if quickest_dtype() == "float32" else 0.024
"""Of each engine: for some 35 conversations of two chunks."""
WARM = 120
"""Requests before anything is counted: from then on everything is full, and each chunk that comes evicts another one."""


@contextmanager
def engine(model: str, place: Path) -> Iterator[tuple[Server, str]]:
    """A server and the endpoint of its events."""
    place.mkdir()
    config = place / "tiercache.yaml"
    config.write_text(CONFIG.format(chunk=CHUNK_TOKENS, place=place, disk_gb=DISK_GB))
    endpoint = f"ipc://{place}/events"
    events = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint})
    small = ("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "48", "--max-model-len", "1024")
    with serving(Path(model), place / "server.log", config, arguments=(*small, "--kv-events-config", events)) as server:
        yield server, endpoint


async def ask_all(url: str, seed: int) -> list[tuple[int, int]]:
    """Conversations come back at random, a few at once, and more of them than both engines have room for. The tokens that
    each hit, and those that the router had counted on."""
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(CONVERSATIONS)]
    turns = iter(numbers.choices(prompts, k=WARM + REQUESTS))
    found: list[tuple[int, int]] = []

    async def ask(client: httpx.AsyncClient) -> None:
        for prompt in turns:
            body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            answer = await client.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            details = answer.json()["usage"]["prompt_tokens_details"] or {}
            found.append((details.get("cached_tokens") or 0, int(answer.headers["x-kv-tokens"])))

    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        await asyncio.gather(*(ask(client) for _ in range(AT_ONCE)))
    return found[WARM:]


@takes_minutes
def test_router_finds_more_than_taking_turns(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is hardly ever wrong while everything is evicted."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with ExitStack() as stack:
        engines = [stack.enter_context(engine(model, tmp_path / name)) for name in "ab"]
        named = [word for server, endpoint in engines for word in ("--engine", f"{server.url},{endpoint}")]
        with running_example(EXAMPLES / "kv_events_router.py", tmp_path / "turns.log", *named, "--round-robin") as url:
            turns = asyncio.run(ask_all(url, seed=1))
        with running_example(EXAMPLES / "kv_events_router.py", tmp_path / "router.log", *named) as url:
            routed = asyncio.run(ask_all(url, seed=2))
    turns_rate, routed_rate = (sum(hit for hit, _ in one) / (PROMPT_TOKENS * len(one)) for one in (turns, routed))
    stale = [(hit, expected) for hit, expected in routed if hit < expected]
    print(f"\nhit rate {routed_rate:.3f}, taking turns {turns_rate:.3f}; stale {len(stale)} of {len(routed)}: {stale}")
    assert routed_rate > turns_rate + 0.1
    assert len(stale) < 0.01 * len(routed)
    assert 0.2 < routed_rate < 0.97, "not everything fits"
