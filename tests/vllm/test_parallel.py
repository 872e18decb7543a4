"""Several ranks and several engines, each a process of its own: vLLM's own prefix cache says what is right.

The models are tiny, with weights that make an answer depend on its KV: a rank that got another rank's bytes is seen.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    close_answer,
    drive,
    same_answer,
    tiercache_settings,
)
from tests.vllm.tiny import LAYERS, VOCABULARY, tiny_llama, tiny_mla

pytestmark = pytest.mark.usefixtures("imported")

PROMPT_TOKENS = 300
HIT_TOKENS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
ARENA_GB = 0.02
CHUNKS = -(-HIT_TOKENS // CHUNK_TOKENS)


def prompt_of(tokens: int) -> dict[str, list[int]]:
    numbers = random.Random(3)
    return {"prompt_token_ids": [2, *(numbers.randrange(2, VOCABULARY) for _ in range(tokens - 1))]}


PROMPT = prompt_of(PROMPT_TOKENS)
GENERATE: list[Any] = ["generate", [PROMPT], 4]
EMPTIED: list[list[Any]] = [["idle"], ["reset_prefix_cache"]]
"""The engine's own cache; what it has of finished requests is free only after one more step."""


def engine_of(model: Path, settings: dict[str, Any], ranks: int = 2, **engine: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 16 << 20,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": True,
        "tensor_parallel_size": ranks,
        "tiercache": settings,
        **({"distributed_executor_backend": "mp"} if ranks > 1 else {}),
        **engine,
    }


def settings_of(directory: Path, **settings: Any) -> dict[str, Any]:
    return tiercache_settings(directory / "kv", max_local_cpu_size=ARENA_GB, **settings)


def answers_of(engine: dict[str, Any], steps: list[tuple[str, list[Any]]]) -> tuple[dict[str, Any], str]:
    """By the names of the steps; answers to one prompt as they are."""
    found, log = drive(engine, [step for _, step in steps])
    unpacked = [answer[0] if step[0] == "generate" else answer for (_, step), answer in zip(steps, found, strict=True)]
    return {name: answer for (name, _), answer in zip(steps, unpacked, strict=True)}, log


def emptied() -> list[tuple[str, list[Any]]]:
    return [("", step) for step in EMPTIED]


def test_two_ranks_with_heads_of_their_own(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", kv_heads=2)
    settings = settings_of(tmp_path, shm_name=f"ranks-{tmp_path.name}")
    found, log = answers_of(
        engine_of(model, settings),
        [
            ("cold", GENERATE),
            ("reference", GENERATE),
            ("computed", ["on_workers", "kv_digests"]),
            ("", ["on_workers", "flush"]),
            *emptied(),
            ("ram", GENERATE),
            *emptied(),
            ("", ["on_workers", "clear_hot"]),
            ("disk", GENERATE),
            *emptied(),
            ("lost", ["lose_tail", 1]),
            ("shorter", GENERATE),
            ("", ["on_workers", "flush"]),
            *emptied(),
            ("", ["on_workers", "clear_hot"]),
            ("", ["damage_files", str(tmp_path / "kv"), "flip", 100]),
            ("damaged", GENERATE),
        ],
    )
    reference = found["reference"]
    assert (found["cold"]["cached"], reference["cached"]) == (0, HIT_TOKENS)
    for tier in ("ram", "disk"):
        assert found[tier]["cached"] == HIT_TOKENS
        assert same_answer(found[tier], reference)
    # What one rank lacks or cannot read, all lack.
    assert found["lost"] == [CHUNKS, CHUNKS - 1]
    assert found["shorter"]["cached"] == HIT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS < HIT_TOKENS
    assert close_answer(found["shorter"], reference)
    assert close_answer(found["damaged"], reference)
    assert found["damaged"]["cached"] < HIT_TOKENS and "the rest is computed instead" not in log
    first, second = map(set, found["computed"])
    assert not first & second, "each rank has bytes of its own"

    again, _ = answers_of(
        engine_of(model, settings),
        [
            ("disk", GENERATE),
            ("loaded", ["on_workers", "kv_digests"]),
            ("", ["on_workers", "corrupt_hot"]),
            *emptied(),
            ("wrong", GENERATE),
            ("wrongly", ["on_workers", "kv_digests"]),
        ],
    )
    assert again["disk"]["cached"] == again["wrong"]["cached"] == HIT_TOKENS
    assert close_answer(again["disk"], reference)
    assert not same_answer(again["wrong"], reference)
    for computed, loaded, wrongly in zip(found["computed"], again["loaded"], again["wrongly"], strict=True):
        blocks = LAYERS * HIT_TOKENS // BLOCK_TOKENS
        assert len(set(loaded) & set(computed)) >= blocks
        assert len(set(wrongly) - set(loaded)) >= blocks


@pytest.mark.needs("redis-server")
def test_two_ranks_with_one_head_store_it_once_in_redis_and_a_rank_alone_reads_it(tmp_path: Path) -> None:
    from tests.remote.redis import servers

    model = tiny_llama(tmp_path / "model", kv_heads=1)
    with servers.running(tmp_path) as server:
        settings: dict[str, Any] = {
            "chunk_size": CHUNK_TOKENS,
            "save_unfull_chunk": True,
            "max_local_cpu_size": ARENA_GB,
            "remote_storage_plugins": ["redis.shared"],
            "extra_config": {"remote_storage_plugin.redis.shared.url": f"redis://127.0.0.1:{server.port}"},
        }
        found, _ = answers_of(
            engine_of(model, settings),
            [
                ("cold", GENERATE),
                ("reference", GENERATE),
                ("computed", ["on_workers", "kv_digests"]),
                ("", ["on_workers", "flush"]),
                *emptied(),
                ("", ["on_workers", "clear_hot"]),
                ("redis", GENERATE),
                ("statistics", ["on_workers", "statistics"]),
            ],
        )
        alone, _ = answers_of(
            engine_of(model, settings, ranks=1),
            [("redis", GENERATE), ("corrupted", ["corrupt_hot"]), *emptied(), ("wrong", GENERATE)],
        )
    reference = found["reference"]
    assert found["redis"]["cached"] == alone["redis"]["cached"] == HIT_TOKENS
    assert same_answer(found["redis"], reference)
    assert close_answer(alone["redis"], reference)
    assert alone["corrupted"] == CHUNKS
    assert not close_answer(alone["wrong"], reference)
    assert found["computed"][0] == found["computed"][1], "both ranks have the same bytes"
    assert sum(rank["writers"]["redis.shared"]["written"] for rank in found["statistics"]) == CHUNKS
    assert [rank["tiers"]["redis.shared"]["reads"] for rank in found["statistics"]] == [CHUNKS, CHUNKS]


def test_mlas_latents_are_stored_once_by_two_ranks_and_read_bit_for_bit_by_one(tmp_path: Path) -> None:
    """Answers do not say whether MLA's KV is right: vLLM's CPU kernels give other ones for a token that was decoded than
    for one of the prompt (log-probabilities differ by 0.3), and switch the engine's own prefix cache off."""
    block_tokens, hit_tokens = 16, 288
    mla: dict[str, Any] = {"enable_prefix_caching": False, "block_size": block_tokens}
    model, settings = tiny_mla(tmp_path / "model"), settings_of(tmp_path)
    found, _ = answers_of(
        engine_of(model, settings, **mla),
        [
            ("cold", GENERATE),
            ("computed", ["on_workers", "kv_digests"]),
            ("", ["on_workers", "flush"]),
            ("hit", GENERATE),
            ("statistics", ["on_workers", "statistics"]),
        ],
    )
    alone, _ = answers_of(
        engine_of(model, settings, ranks=1, **mla),
        [
            ("hit", GENERATE),
            ("loaded", ["on_workers", "kv_digests"]),
            ("corrupted", ["corrupt_hot"]),
            ("", ["idle"]),
            ("wrong", GENERATE),
            ("wrongly", ["on_workers", "kv_digests"]),
        ],
    )
    assert found["cold"]["cached"] == 0
    assert found["hit"]["cached"] == alone["hit"]["cached"] == alone["wrong"]["cached"] == hit_tokens
    assert found["computed"][0] == found["computed"][1]
    chunks = -(-hit_tokens // CHUNK_TOKENS)
    assert sum(rank["tiers"]["disk"]["writes"] for rank in found["statistics"]) == chunks == alone["corrupted"]
    computed, (loaded,), (wrongly,) = set(found["computed"][0]), alone["loaded"], alone["wrongly"]
    assert len(computed & set(loaded)) >= LAYERS * hit_tokens // block_tokens
    assert len(set(wrongly) - set(loaded)) >= LAYERS * hit_tokens // block_tokens


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2)])
def test_parts_of_heads_are_found_by_another_number_of_ranks(tmp_path: Path, writers: int, readers: int) -> None:
    heads, hit_tokens = 4, (PROMPT_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    model, settings = tiny_llama(tmp_path / "model", kv_heads=heads), settings_of(tmp_path, kv_head_parts=heads)
    found, _ = answers_of(
        engine_of(model, settings, ranks=writers),
        [
            ("cold", GENERATE),
            ("reference", GENERATE),
            ("computed", ["on_workers", "kv_head_digests"]),
            ("", ["on_workers", "flush"]),
            *emptied(),
            ("ram", GENERATE),
            ("statistics", ["on_workers", "statistics"]),
        ],
    )
    again, log = answers_of(
        engine_of(model, settings, ranks=readers),
        [
            ("disk", GENERATE),
            ("loaded", ["on_workers", "kv_head_digests"]),
            ("corrupted", ["on_workers", "corrupt_hot"]),
            *emptied(),
            ("wrong", GENERATE),
        ],
    )
    reference = found["reference"]
    assert found["cold"]["cached"] == 0
    assert found["ram"]["cached"] == again["disk"]["cached"] == again["wrong"]["cached"] == hit_tokens, log
    assert close_answer(found["ram"], reference) and close_answer(again["disk"], reference)
    chunks = heads * hit_tokens // CHUNK_TOKENS
    assert sum(rank["tiers"]["disk"]["writes"] for rank in found["statistics"]) == chunks == sum(again["corrupted"])
    computed, loaded = (set().union(*digests) for digests in (found["computed"], again["loaded"]))
    assert len(computed & loaded) >= LAYERS * heads * hit_tokens // BLOCK_TOKENS
    assert not close_answer(again["wrong"], reference)


def test_engines_side_by_side_share_a_configuration_and_a_disk(tmp_path: Path, short_path: Path) -> None:
    """Data parallelism: what one engine stored, the other one finds; names of sockets and shared memory do not collide."""
    model = tiny_llama(tmp_path / "model", kv_heads=2)
    socket = str(short_path / "control")
    settings = settings_of(tmp_path, shm_name=f"engines-{tmp_path.name}", control_socket=socket)
    engines = engine_of(model, settings, ranks=1, data_parallel_size=2)
    (cold, reference, written, other, seen), log = drive(
        engines,
        [
            ["generate_on", 0, PROMPT, 4],
            ["generate_on", 0, PROMPT, 4],
            ["control_until_written", socket, "disk", CHUNKS],
            ["generate_on", 1, PROMPT, 4],
            ["control", f"{socket}.1", "statistics", {}],
        ],
    )
    assert (cold["cached"], reference["cached"], other["cached"]) == (0, HIT_TOKENS, HIT_TOKENS)
    assert same_answer(other, reference)
    assert written["statistics"]["tiers"]["disk"]["writes"] == CHUNKS
    assert seen["statistics"]["tiers"]["disk"]["reads"] == CHUNKS
    assert log.count("every chunk was written") == 2
