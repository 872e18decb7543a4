"""Several ranks and several engines, each a process of its own: vLLM's own prefix cache says what is right.

The models are tiny, with weights that make an answer depend on its KV: a rank that got another rank's bytes is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.answers import assert_hits, close_answer, same_answer
from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, drive_named, prompt_of, tiercache_settings, tiny_engine
from tests.vllm.models import LAYERS, tiny_model

pytestmark = pytest.mark.usefixtures("imported")

PROMPT_TOKENS = 300
HIT_TOKENS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
CHUNKS = -(-HIT_TOKENS // CHUNK_TOKENS)
PROMPT = prompt_of(3, PROMPT_TOKENS)
GENERATE: list[Any] = ["generate", [PROMPT], 4]
DIGESTS = ["on_workers", "kv_digests"]
FLUSHED, CLEARED = ("", ["on_workers", "flush"]), ("", ["on_workers", "clear_hot"])
CORRUPTED = ("corrupted", ["on_workers", "corrupt_hot"])
STATISTICS = ("statistics", ["on_workers", "statistics"])
EMPTIED: list[tuple[str, list[Any]]] = [("", ["idle"]), ("", ["reset_prefix_cache"])]
"""The engine's own cache; what it has of finished requests is free only after one more step."""
COMPUTED = [("cold", GENERATE), ("reference", GENERATE), ("computed", DIGESTS), FLUSHED, *EMPTIED]


def ranks_of(model: Path, settings: dict[str, Any], ranks: int = 2, **engine: Any) -> dict[str, Any]:
    """An engine with so many ranks."""
    many = {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"} if ranks > 1 else {}
    return tiny_engine(model, max_num_batched_tokens=1024, tiercache=settings, **many, **engine)


def settings_of(directory: Path, **settings: Any) -> dict[str, Any]:
    return tiercache_settings(directory / "kv", max_local_cpu_size=0.02, **settings)


def contents(digests: list[list[Any]]) -> set[str]:
    return {digest for _, _, digest in digests}


def test_two_ranks_with_heads_of_their_own(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, shm_name=f"ranks-{tmp_path.name}")
    engine = ranks_of(tiny_model(tmp_path / "model", "llama", num_key_value_heads=2), settings)
    found, log = drive_named(
        engine,
        [
            *(*COMPUTED, ("ram", GENERATE), *EMPTIED),
            *(CLEARED, ("disk", GENERATE), *EMPTIED),
            *(("lost", ["on_workers", "lose_tail", 1]), ("shorter", GENERATE), FLUSHED, *EMPTIED),
            *(CLEARED, ("", ["damage_files", str(tmp_path / "kv"), "flip", 100]), ("damaged", GENERATE)),
        ],
    )
    reference = found["reference"]
    assert (found["cold"]["cached"], reference["cached"]) == (0, HIT_TOKENS)
    assert_hits([found["ram"], found["disk"]], [reference] * 2)
    # What one rank lacks or cannot read, all lack.
    assert found["lost"] == [CHUNKS, CHUNKS - 1]
    assert found["shorter"]["cached"] == HIT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS < HIT_TOKENS
    assert close_answer(found["shorter"], reference)
    assert close_answer(found["damaged"], reference)
    assert found["damaged"]["cached"] < HIT_TOKENS and "the rest is computed instead" not in log
    first, second = map(contents, found["computed"])
    assert not first & second, "each rank has bytes of its own"

    steps = [("disk", GENERATE), ("loaded", DIGESTS), CORRUPTED, *EMPTIED, ("wrong", GENERATE), ("wrongly", DIGESTS)]
    again, _ = drive_named(engine, steps)
    assert again["disk"]["cached"] == again["wrong"]["cached"] == HIT_TOKENS
    assert close_answer(again["disk"], reference)
    assert not same_answer(again["wrong"], reference)
    for ranks in zip(found["computed"], again["loaded"], again["wrongly"], strict=True):
        computed, loaded, wrongly = map(contents, ranks)
        assert min(len(loaded & computed), len(wrongly - loaded)) >= LAYERS * HIT_TOKENS // BLOCK_TOKENS


@pytest.mark.needs("redis-server")
def test_two_ranks_with_one_head_store_it_once_in_redis_and_a_rank_alone_reads_it(tmp_path: Path) -> None:
    from tests.remote.redis import servers

    model = tiny_model(tmp_path / "model", "llama", num_key_value_heads=1)
    with servers.running(tmp_path) as server:
        settings: dict[str, Any] = {"chunk_size": CHUNK_TOKENS, "max_local_cpu_size": 0.02}
        settings["remote_storage_plugins"] = ["redis.shared"]
        settings["extra_config"] = {"remote_storage_plugin.redis.shared.url": f"redis://127.0.0.1:{server.port}"}
        found, _ = drive_named(ranks_of(model, settings), [*COMPUTED, CLEARED, ("redis", GENERATE), STATISTICS])
        steps = [("redis", GENERATE), ("corrupted", ["corrupt_hot"]), *EMPTIED, ("wrong", GENERATE)]
        alone, _ = drive_named(ranks_of(model, settings, ranks=1), steps)
    reference = found["reference"]
    assert_hits([found["redis"]], [reference])
    assert alone["redis"]["cached"] == HIT_TOKENS and close_answer(alone["redis"], reference)
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
    model, settings = tiny_model(tmp_path / "model", "deepseek_v2"), settings_of(tmp_path)
    steps = [("cold", GENERATE), ("computed", DIGESTS), FLUSHED, ("hit", GENERATE), STATISTICS]
    found, _ = drive_named(ranks_of(model, settings, **mla), steps)
    steps = [("hit", GENERATE), ("loaded", DIGESTS), ("corrupted", ["corrupt_hot"]), ("", ["idle"])]
    steps += [("wrong", GENERATE), ("wrongly", DIGESTS)]
    alone, _ = drive_named(ranks_of(model, settings, ranks=1, **mla), steps)
    assert found["cold"]["cached"] == 0
    assert found["hit"]["cached"] == alone["hit"]["cached"] == alone["wrong"]["cached"] == hit_tokens
    assert found["computed"][0] == found["computed"][1]
    chunks = -(-hit_tokens // CHUNK_TOKENS)
    assert sum(rank["tiers"]["disk"]["writes"] for rank in found["statistics"]) == chunks == alone["corrupted"]
    computed, loaded, wrongly = map(contents, (found["computed"][0], *alone["loaded"], *alone["wrongly"]))
    assert min(len(computed & loaded), len(wrongly - loaded)) >= LAYERS * hit_tokens // block_tokens


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2)])
def test_parts_of_heads_are_found_by_another_number_of_ranks(tmp_path: Path, writers: int, readers: int) -> None:
    heads, hit_tokens = 4, (PROMPT_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    model = tiny_model(tmp_path / "model", "llama", num_key_value_heads=heads)
    settings = settings_of(tmp_path, kv_head_parts=heads)
    found, _ = drive_named(ranks_of(model, settings, ranks=writers), [*COMPUTED, ("ram", GENERATE), STATISTICS])
    steps = [("disk", GENERATE), ("loaded", DIGESTS), CORRUPTED, *EMPTIED, ("wrong", GENERATE)]
    again, log = drive_named(ranks_of(model, settings, ranks=readers), steps)

    def of_the_model(ranks: list[list[list[Any]]]) -> set[tuple[int, int, str]]:
        """Return the digests with the number of their head among those of all ranks."""
        here = heads // len(ranks)
        return {(layer, rank * here + head, one) for rank, found in enumerate(ranks) for layer, head, one in found}

    reference = found["reference"]
    assert found["cold"]["cached"] == 0
    assert found["ram"]["cached"] == again["disk"]["cached"] == again["wrong"]["cached"] == hit_tokens, log
    assert close_answer(found["ram"], reference) and close_answer(again["disk"], reference)
    chunks = heads * hit_tokens // CHUNK_TOKENS
    assert sum(rank["tiers"]["disk"]["writes"] for rank in found["statistics"]) == chunks == sum(again["corrupted"])
    shared = of_the_model(found["computed"]) & of_the_model(again["loaded"])
    assert len(shared) >= LAYERS * heads * hit_tokens // BLOCK_TOKENS
    assert not close_answer(again["wrong"], reference)


def test_engines_side_by_side_share_a_configuration_and_a_disk(tmp_path: Path, short_path: Path) -> None:
    """Data parallelism: what one engine stored, the other one finds; names of sockets and shared memory do not collide."""
    socket = str(short_path / "control")
    settings = settings_of(tmp_path, shm_name=f"engines-{tmp_path.name}", control_socket=socket)
    found, log = drive_named(
        ranks_of(tiny_model(tmp_path / "model", "llama"), settings, ranks=1, data_parallel_size=2),
        [
            ("cold", ["generate_on", 0, PROMPT, 4]),
            ("reference", ["generate_on", 0, PROMPT, 4]),
            ("written", ["control_until", socket, {"statistics": {"writers": {"disk": {"written": CHUNKS}}}}]),
            ("other", ["generate_on", 1, PROMPT, 4]),
            ("seen", ["control", f"{socket}.1", "statistics", {}]),
        ],
    )
    assert (found["cold"]["cached"], found["reference"]["cached"]) == (0, HIT_TOKENS)
    assert_hits([found["other"]], [found["reference"]])
    assert found["written"]["statistics"]["tiers"]["disk"]["writes"] == CHUNKS
    assert found["seen"]["statistics"]["tiers"]["disk"]["reads"] == CHUNKS
    assert log.count("every chunk was written") == 2
