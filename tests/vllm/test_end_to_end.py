"""Real vLLM with real weights: a cached answer is the answer of vLLM's own prefix cache at the same hit length.

Each engine runs in a process of its own and goes through many steps, because starting one takes six seconds of a core.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hf3fs_emulator import Hf3fsEmulator
from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, close_answer, drive, same_answer, tiercache_settings


@pytest.fixture(scope="session")
def first_life(
    model: str, prompts: list[str], continued: str, diverged: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], str]:
    """An engine that computes, hits RAM, hits disk, is given damaged files, and at last wrong KV."""
    directory = tmp_path_factory.mktemp("kv")
    names = ["cold", "flush", "cpu", "clear", "disk", "clear", "damaged", "damaged_answer", "flush", "healed", "stats"]
    names += ["clear", "all_damaged", "continued_damaged", "flush", "clear", "continued_healed", "prefetch", "diverged"]
    steps: list[list[Any]] = [
        ["generate", prompts],
        ["flush"],
        ["generate", prompts],
        ["clear_hot"],
        ["generate", prompts],
        ["clear_hot"],
        ["damage_files", str(directory), "flip", 3],
        ["generate", prompts],
        ["flush"],
        ["generate", prompts],
        ["statistics"],
        ["clear_hot"],
        ["damage_files", str(directory), "flip", 1],
        ["generate", [continued]],
        ["flush"],
        ["clear_hot"],
        ["generate", [continued]],
        ["generate", prompts],
        ["generate", [diverged]],
        ["corrupt_hot"],
        ["generate", prompts],
    ]
    answers, log = drive(
        {
            "model": model,
            "enable_prefix_caching": False,
            "tiercache": tiercache_settings(directory),
        },
        steps,
    )
    return directory, dict(zip([*names, "corrupted", "wrong"], answers, strict=True)), log


def test_cold_request_is_computed(first_life: tuple[Path, dict[str, Any], str]) -> None:
    assert [answer["cached"] for answer in first_life[1]["cold"]] == [0, 0]


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_hit_gives_the_prefix_caches_answer(
    first_life: tuple[Path, dict[str, Any], str], oracle: list[dict[str, Any]], tier: str
) -> None:
    for ours, theirs in zip(first_life[1][tier], oracle, strict=True):
        assert ours["cached"] == theirs["cached"]
        assert same_answer(ours, theirs)


def test_a_hit_ends_where_the_prompts_differ_and_not_with_the_last_whole_chunk(
    first_life: tuple[Path, dict[str, Any], str], oracles: list[dict[str, Any]]
) -> None:
    (ours,), theirs = first_life[1]["diverged"], oracles[3]
    assert theirs["cached"] % CHUNK_TOKENS == BLOCK_TOKENS, "the prompts differ elsewhere: change DIVERGED_AFTER"
    assert ours["cached"] == theirs["cached"]
    assert same_answer(ours, theirs)


def test_wrong_kv_changes_the_answer(
    first_life: tuple[Path, dict[str, Any], str], oracle: list[dict[str, Any]]
) -> None:
    """The negative control: if this passed with reversed bytes, the tests above would prove nothing."""
    assert first_life[1]["corrupted"] > 0
    for ours, theirs in zip(first_life[1]["wrong"], oracle, strict=True):
        assert ours["cached"] == theirs["cached"]
        assert not same_answer(ours, theirs)


def test_damaged_chunks_are_recomputed_and_stored_again(
    first_life: tuple[Path, dict[str, Any], str], oracle: list[dict[str, Any]]
) -> None:
    _, answers, _ = first_life
    assert answers["damaged"] >= 2
    assert answers["stats"]["reader"]["corrupt"] == answers["damaged"]
    for ours, theirs in zip(answers["damaged_answer"], oracle, strict=True):
        assert close_answer(ours, theirs)
    for ours, theirs in zip(answers["healed"], oracle, strict=True):
        assert ours["cached"] == theirs["cached"]
        assert close_answer(ours, theirs)


def test_what_is_damaged_is_found_out_before_it_is_promised(
    first_life: tuple[Path, dict[str, Any], str], oracles: list[dict[str, Any]]
) -> None:
    """The load in the step itself would have failed, and what is computed beside it would be wrong."""
    _, answers, log = first_life
    assert answers["all_damaged"] > 5
    assert "the rest is computed instead" not in log
    (damaged,), (healed,), theirs = answers["continued_damaged"], answers["continued_healed"], oracles[2]
    assert close_answer(damaged, theirs)
    assert healed["cached"] == theirs["cached"] > 375
    assert close_answer(healed, theirs)


def test_operators_find_the_lines_they_know(first_life: tuple[Path, dict[str, Any], str]) -> None:
    log = first_life[2]
    lines = re.findall(
        r"Reqid: (\S+), Total tokens (\d+), engine computed tokens: (\d+), hit tokens: (\d+) "
        r"\(cpu: (\d+), disk: (\d+)\), need to load: (\d+)",
        log,
    )
    assert len(lines) == 17
    cold, cpu, disk = lines[0:2], lines[2:4], lines[4:6]
    assert all(int(hit) == int(load) == 0 for _, _, _, hit, _, _, load in cold)
    assert all(int(hit) == int(ram) == int(load) > 250 for _, _, _, hit, ram, _, load in cpu)
    assert all(int(hit) == int(flash) == int(load) > 250 for _, _, _, hit, _, flash, load in disk)
    assert len(re.findall(r"Stored \d+ out of total \d+ tokens for request", log)) >= 4


def test_new_process_loads_asynchronously_what_the_old_one_stored(
    first_life: tuple[Path, dict[str, Any], str], model: str, prompts: list[str], oracle: list[dict[str, Any]]
) -> None:
    directory = first_life[0]
    (hit, truncated, recomputed), log = drive(
        {
            "model": model,
            "enable_prefix_caching": False,
            "tiercache": tiercache_settings(directory, enable_async_loading=True, local_cpu=False),
        },
        [["generate", prompts], ["damage_files", str(directory), "truncate", 2], ["generate", prompts]],
    )
    assert "WAITING" not in log
    for ours, theirs in zip(hit, oracle, strict=True):
        assert ours["cached"] == theirs["cached"]
        assert ours["tokens"][:4] == theirs["tokens"][:4]
    assert truncated >= 2
    for ours, theirs in zip(recomputed, oracle, strict=True):
        assert ours["tokens"][:4] == theirs["tokens"][:4]


def test_compressed_chunks_give_the_prefix_caches_answer(
    model: str, prompts: list[str], oracle: list[dict[str, Any]], tmp_path: Path
) -> None:
    (cold, _, _, hit, counted), _ = drive(
        {
            "model": model,
            "enable_prefix_caching": False,
            "tiercache": tiercache_settings(tmp_path, disk_compression="zstd"),
        },
        [["generate", prompts], ["flush"], ["clear_hot"], ["generate", prompts], ["statistics"]],
    )
    assert [answer["cached"] for answer in cold] == [0, 0]
    for ours, theirs in zip(hit, oracle, strict=True):
        assert ours["cached"] == theirs["cached"]
        assert same_answer(ours, theirs)
    disk = counted["tiers"]["disk"]
    assert disk["stored_bytes"] < 0.9 * disk["written_bytes"]


def test_scheduler_and_worker_in_two_processes(
    model: str, prompts: list[str], oracle: list[dict[str, Any]], tmp_path: Path
) -> None:
    (cold, hit), log = drive(
        {
            "model": model,
            "enable_prefix_caching": False,
            "distributed_executor_backend": "mp",
            "tiercache": tiercache_settings(tmp_path),
        },
        [["generate", prompts], ["generate", prompts]],
    )
    assert [answer["cached"] for answer in cold] == [0, 0]
    for ours, theirs in zip(hit, oracle, strict=True):
        assert ours["cached"] == theirs["cached"]
        assert same_answer(ours, theirs)
    assert "Stored" in log and "every chunk was written" in log


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_many_requests_in_little_memory(
    model: str, prompts: list[str], oracle: list[dict[str, Any]], tmp_path: Path, device: str
) -> None:
    """Preemption, blocks that are held for their copies, generated tokens that are stored, an engine whose own block hashes
    are weak, and a reset of all caches."""
    (first, second, reset, after), log = drive(
        {
            "model": model,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "xxhash",
            "max_model_len": 512,
            "num_gpu_blocks_override": 20,
            "tiercache": tiercache_settings(tmp_path, save_decode_cache=True, device=device),
        },
        [
            ["generate_together", prompts, 60],
            ["generate_together", prompts, 60],
            ["reset_everything"],
            ["generate", prompts],
        ],
    )
    assert "is not cryptographic: blocks are hashed again for the cache" in log
    assert first["preempted"] >= 1 and second["preempted"] >= 1
    for answers in (first, second):
        for tokens, theirs in zip(answers["tokens"], oracle, strict=True):
            assert len(tokens) == 60 and tokens[:4] == theirs["tokens"][:4]
    assert all(cached >= 256 for cached in second["cached"])
    assert reset
    assert [answer["cached"] for answer in after] == [0, 0]
    for ours, theirs in zip(after, oracle, strict=True):
        assert close_answer(ours, theirs)
    assert not re.search(r"Traceback|of no use|failed", log)


def device_settings(directory: Path) -> dict[str, Any]:
    """The engine's memory treated as a device's: all KV goes through the device's pool and paged copies."""
    return tiercache_settings(
        directory / "disk", device="cpu", gds_path=str(directory / "gds"), gds_buffer_size=128, use_gds=False
    )


@pytest.fixture(scope="session")
def device_life(
    model: str, prompts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], str]:
    directory = tmp_path_factory.mktemp("device")
    names = ["cold", "flush", "hot", "clear", "gds", "statistics"]
    steps: list[list[Any]] = [
        ["generate", prompts],
        ["flush"],
        ["generate", prompts],
        ["clear_hot"],
        ["generate", prompts],
        ["statistics"],
    ]
    answers, log = drive(
        {
            "model": model,
            "enable_prefix_caching": False,
            "tiercache": device_settings(directory),
        },
        steps,
    )
    return directory, dict(zip(names, answers, strict=True)), log


@pytest.mark.parametrize("tier", ["hot", "gds"])
def test_hit_through_device_memory_gives_the_prefix_caches_answer(
    device_life: tuple[Path, dict[str, Any], str], oracle: list[dict[str, Any]], tier: str
) -> None:
    _, answers, log = device_life
    assert [answer["cached"] for answer in answers["cold"]] == [0, 0]
    for ours, theirs in zip(answers[tier], oracle, strict=True):
        assert ours["cached"] == theirs["cached"]
        assert same_answer(ours, theirs)
    assert not re.search(r"Traceback|of no use|rest is computed instead", log)


def test_gds_is_read_into_the_device_and_not_through_the_host(
    device_life: tuple[Path, dict[str, Any], str],
) -> None:
    statistics = device_life[1]["statistics"]
    chunks = statistics["writers"]["gds"]["written"]
    assert chunks == statistics["writers"]["disk"]["written"] >= 8
    assert statistics["device"]["reader"]["hits"]["gds"] == chunks
    assert statistics["tiers"]["disk"]["reads"] == 0
    assert statistics["tiers"]["cpu"]["writes"] == chunks, "by the cold requests; GDS was not promoted"
    assert statistics["device"]["slots_free"] == statistics["device"]["slots"]


def test_new_process_with_device_memory_loads_what_the_old_one_stored(
    device_life: tuple[Path, dict[str, Any], str], model: str, prompts: list[str], oracle: list[dict[str, Any]]
) -> None:
    """From GDS, asynchronously; when its files are gone, from disk through the host; and at last wrong KV."""
    directory = device_life[0]
    (_, gds, removed, disk, statistics, corrupted, wrong), log = drive(
        {
            "model": model,
            "enable_prefix_caching": False,
            "tiercache": device_settings(directory) | {"enable_async_loading": True},
        },
        [
            ["scanned"],
            ["generate", prompts],
            ["remove_files", str(directory / "gds")],
            ["generate", prompts],
            ["statistics"],
            ["corrupt_hot"],
            ["generate", prompts],
        ],
    )
    assert removed >= 8
    assert statistics["device"]["reader"]["hits"]["gds"] >= 8
    assert statistics["reader"]["hits"]["disk"] >= 8
    for answers in (gds, disk):
        for ours, theirs in zip(answers, oracle, strict=True):
            assert ours["cached"] == theirs["cached"]
            assert same_answer(ours, theirs)
    assert not re.search(r"Traceback|of no use|rest is computed instead", log)
    # The negative control: if the answers stayed with reversed bytes, all this would prove nothing.
    assert corrupted >= 8
    for ours, theirs in zip(wrong, oracle, strict=True):
        assert ours["cached"] == theirs["cached"]
        assert not close_answer(ours, theirs)


@pytest.fixture(scope="session")
def mounted_3fs() -> Iterator[Hf3fsEmulator]:
    with Hf3fsEmulator() as emulator:
        yield emulator


@pytest.mark.uses("fuse3")
@pytest.mark.parametrize("shared_arena", [False, True], ids=["one copy", "no copy"])
def test_3fs_below_the_cpu_tier_gives_the_prefix_caches_answer_in_a_new_process_too(
    mounted_3fs: Hf3fsEmulator, model: str, prompts: list[str], oracle: list[dict[str, Any]], shared_arena: bool
) -> None:
    """3FS is the only storage below RAM. Wrong KV changes the answer at last: what was compared is what was loaded."""
    settings: dict[str, Any] = {
        "chunk_size": CHUNK_TOKENS,
        "save_unfull_chunk": True,
        "max_local_cpu_size": 0.25,
        "max_hf3fs_size": 1.0,
        "remote_storage_plugins": ["hf3fs.primary"],
        "extra_config": {
            "remote_storage_plugin.hf3fs.primary.base_path": str(mounted_3fs.mount / f"kv-{shared_arena}"),
            **({"shm_name": f"vllm-3fs-{os.getpid()}"} if shared_arena else {}),
        },
    }
    engine = {
        "model": model,
        "enable_prefix_caching": False,
        "tiercache": settings,
    }
    (_, flushed, _, loaded, statistics), _ = drive(
        engine,
        [["generate", prompts], ["flush"], ["clear_hot"], ["generate", prompts], ["statistics"]],
        mounted_3fs.environment,
    )
    assert flushed
    assert statistics["tiers"]["hf3fs.primary"]["reads"] >= 8
    (_, restored, _, wrong), _ = drive(
        engine, [["scanned"], ["generate", prompts], ["corrupt_hot"], ["generate", prompts]], mounted_3fs.environment
    )
    for answers in (loaded, restored):
        for ours, theirs in zip(answers, oracle, strict=True):
            assert ours["cached"] == theirs["cached"]
            assert same_answer(ours, theirs)
    assert not any(same_answer(ours, theirs) for ours, theirs in zip(wrong, oracle, strict=True))


@pytest.mark.needs("redis-server")
def test_redis_below_the_cpu_tier_gives_the_prefix_caches_answer_to_another_engine(
    model: str, prompts: list[str], oracle: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Redis is all that the two engines share. Wrong KV changes the answer at last: what was compared is what was loaded."""
    from tests.remote.redis import servers

    with servers.running(tmp_path) as server:
        settings: dict[str, Any] = {
            "chunk_size": CHUNK_TOKENS,
            "save_unfull_chunk": True,
            "max_local_cpu_size": 0.25,
            "remote_storage_plugins": ["redis.shared"],
            "extra_config": {"remote_storage_plugin.redis.shared.url": f"redis://127.0.0.1:{server.port}"},
        }
        engine = {
            "model": model,
            "enable_prefix_caching": False,
            "tiercache": settings,
        }
        (_, flushed, written), _ = drive(engine, [["generate", prompts], ["flush"], ["statistics"]])
        assert flushed
        (loaded, statistics, _, wrong), _ = drive(
            engine, [["generate", prompts], ["statistics"], ["corrupt_hot"], ["generate", prompts]]
        )
    assert statistics["tiers"]["redis.shared"]["reads"] == written["writers"]["redis.shared"]["written"] >= 8
    for ours, theirs in zip(loaded, oracle, strict=True):
        assert ours["cached"] == theirs["cached"]
        assert same_answer(ours, theirs)
    assert not any(same_answer(ours, theirs) for ours, theirs in zip(wrong, oracle, strict=True))
