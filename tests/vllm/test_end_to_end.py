"""Real vLLM with real weights: a cached answer is the answer of vLLM's own prefix cache at the same hit length.

Each engine runs in a process of its own and goes through many steps, because starting one takes six seconds of a core.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hf3fs_emulator import Hf3fsEmulator
from tests.needs import needs_fuse
from tests.vllm.answers import assert_hits, assert_wrong_hits, close_answer
from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, drive, drive_named, tiercache_settings

Answers = list[dict[str, Any]]
Life = tuple[Path, dict[str, Any], str]
CLEAR: tuple[str, list[Any]] = ("", ["clear_hot"])
FLUSH: tuple[str, list[Any]] = ("", ["flush"])


def engine_of(model: str, settings: dict[str, Any], **engine: Any) -> dict[str, Any]:
    return {"model": model, "enable_prefix_caching": False, "tiercache": settings, **engine}


@pytest.fixture(scope="session")
def kv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the files of several engines."""
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="session")
def first_life(model: str, prompts: list[str], continued: str, diverged: str, kv: Path) -> Life:
    """An engine that computes, hits RAM, hits disk, is given damaged files, and at last wrong KV."""
    directory, generate, go_on = kv / "first", ["generate", prompts], ["generate", [continued]]
    steps: list[tuple[str, list[Any]]] = [
        *(("cold", generate), FLUSH, ("cpu", generate), CLEAR, ("disk", generate), CLEAR),
        *(("damaged", ["damage_files", str(directory), "flip", 3]), ("damaged_answer", generate), FLUSH),
        *(("healed", generate), ("statistics", ["statistics"]), CLEAR),
        *(("all_damaged", ["damage_files", str(directory), "flip", 1]), ("continued_damaged", go_on), FLUSH, CLEAR),
        *(("continued_healed", go_on), ("", generate), ("diverged", ["generate", [diverged]])),
        *(("corrupted", ["corrupt_hot"]), ("wrong", generate)),
    ]
    return directory, *drive_named(engine_of(model, tiercache_settings(directory)), steps)


def test_hits_in_memory_and_on_disk_give_the_prefix_caches_answer(first_life: Life, oracle: Answers) -> None:
    _, answers, _ = first_life
    assert [answer["cached"] for answer in answers["cold"]] == [0, 0]
    assert_hits(answers["cpu"], oracle)
    assert_hits(answers["disk"], oracle)
    assert answers["corrupted"] > 0
    assert_wrong_hits(answers["wrong"], oracle)


def test_a_hit_ends_where_the_prompts_differ_also_inside_a_chunk(first_life: Life, oracles: Answers) -> None:
    assert oracles[3]["cached"] % CHUNK_TOKENS == BLOCK_TOKENS, "the prompts differ elsewhere: change DIVERGED_AFTER"
    assert_hits([first_life[1]["diverged"]], oracles[3:])


def test_damaged_chunks_are_recomputed_and_stored_again(first_life: Life, oracle: Answers) -> None:
    _, answers, _ = first_life
    assert answers["damaged"] >= 2
    assert answers["statistics"]["reader"]["corrupt"] == answers["damaged"]
    for damaged, healed, theirs in zip(answers["damaged_answer"], answers["healed"], oracle, strict=True):
        assert close_answer(damaged, theirs)
        assert healed["cached"] == theirs["cached"]
        assert close_answer(healed, theirs)


def test_what_is_damaged_is_found_out_before_it_is_promised(first_life: Life, oracles: Answers) -> None:
    """The load in the step itself would have failed, and what is computed beside it would be wrong."""
    _, answers, log = first_life
    assert answers["all_damaged"] > 5
    assert "the rest is computed instead" not in log
    damaged, healed, theirs = answers["continued_damaged"], answers["continued_healed"], oracles[2]
    assert close_answer(damaged, theirs)
    assert healed["cached"] == theirs["cached"] > 375
    assert close_answer(healed, theirs)


def test_operators_find_the_lines_they_know(first_life: Life) -> None:
    log = first_life[2]
    found = r"hit tokens: (\d+) \(cpu: (\d+), disk: (\d+)\), need to load: (\d+)"
    lines = re.findall(rf"Reqid: \S+, Total tokens \d+, engine computed tokens: \d+, {found}", log)
    assert len(lines) == 17
    cold, cpu, disk = lines[0:2], lines[2:4], lines[4:6]
    assert all(int(hit) == int(load) == 0 for hit, _, _, load in cold)
    assert all(int(hit) == int(ram) == int(load) > 250 for hit, ram, _, load in cpu)
    assert all(int(hit) == int(flash) == int(load) > 250 for hit, _, flash, load in disk)
    assert len(re.findall(r"Stored \d+ out of total \d+ tokens for request", log)) >= 4


@pytest.fixture(scope="session")
def device_life(model: str, prompts: list[str], kv: Path) -> Life:
    """The engine's memory is treated as a device's: all KV goes through the device's pool and paged copies."""
    directory, generate = kv / "device", ["generate", prompts]
    steps = [("cold", generate), FLUSH, ("hot", generate), CLEAR, ("gds", generate), ("statistics", ["statistics"])]
    return directory, *drive_named(device_engine(model, directory), steps)


def device_engine(model: str, directory: Path, **settings: Any) -> dict[str, Any]:
    settings |= {"device": "cpu", "gds_path": str(directory / "gds"), "gds_buffer_size": 128, "use_gds": False}
    return engine_of(model, tiercache_settings(directory / "disk", **settings))


def test_hits_through_device_memory_give_the_prefix_caches_answer(device_life: Life, oracle: Answers) -> None:
    """From the hot cache, and from GDS, which is read into the device and not through the host."""
    _, answers, log = device_life
    assert [answer["cached"] for answer in answers["cold"]] == [0, 0]
    assert_hits(answers["hot"], oracle)
    assert_hits(answers["gds"], oracle)
    assert not re.search(r"Traceback|of no use|rest is computed instead", log)
    statistics = answers["statistics"]
    chunks = statistics["writers"]["gds"]["written"]
    assert chunks == statistics["writers"]["disk"]["written"] >= 8
    assert statistics["reader"]["hits"]["gds"] == chunks
    assert statistics["tiers"]["disk"]["reads"] == 0
    assert statistics["tiers"]["cpu"]["writes"] == chunks, "by the cold requests; GDS was not promoted"
    assert statistics["device"]["slots_free"] == statistics["device"]["slots"]


def test_a_new_process_loads_into_a_device(device_life: Life, model: str, prompts: list[str], oracle: Answers) -> None:
    """From GDS, asynchronously; when its files are gone, from disk through the host; and at last wrong KV."""
    directory, generate = device_life[0], ["generate", prompts]
    steps: list[tuple[str, list[Any]]] = [
        *(("", ["scanned"]), ("gds", generate), ("removed", ["remove_files", str(directory / "gds")])),
        *(("disk", generate), ("statistics", ["statistics"]), ("corrupted", ["corrupt_hot"]), ("wrong", generate)),
    ]
    found, log = drive_named(device_engine(model, directory, enable_async_loading=True), steps)
    assert found["removed"] >= 8 and found["corrupted"] >= 8
    assert found["statistics"]["reader"]["hits"]["gds"] >= 8
    assert found["statistics"]["reader"]["hits"]["disk"] >= 8
    assert_hits(found["gds"], oracle)
    assert_hits(found["disk"], oracle)
    assert not re.search(r"Traceback|of no use|rest is computed instead", log)
    assert_wrong_hits(found["wrong"], oracle)


Remote = tuple[str, dict[str, Any], dict[str, str]]
"""The name of a tier, settings of the cache, and the environment that an engine needs for it."""


@pytest.fixture(
    params=[
        pytest.param("3fs", marks=needs_fuse),
        pytest.param("3fs-in-its-arena", marks=needs_fuse),
        pytest.param("Redis", marks=pytest.mark.needs("redis-server")),
    ]
)
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    if request.param == "Redis":
        from tests.remote.redis import servers

        with servers.running(tmp_path) as server:
            yield "redis.shared", {"remote_storage_plugin.redis.shared.url": f"redis://127.0.0.1:{server.port}"}, {}
    else:
        with Hf3fsEmulator() as emulator:
            extra = {"remote_storage_plugin.hf3fs.primary.base_path": str(emulator.mount / "kv")}
            if request.param == "3fs-in-its-arena":
                extra["shm_name"] = f"vllm-3fs-{os.getpid()}"
            yield "hf3fs.primary", extra, emulator.environment


def test_another_engine_hits_remote_storage(remote: Remote, model: str, prompts: list[str], oracle: Answers) -> None:
    """It lies below the CPU tier, and is all that the two engines share."""
    name, extra, environment = remote
    settings = {"chunk_size": CHUNK_TOKENS, "max_local_cpu_size": 0.25}
    settings |= {"extra_config": extra, "remote_storage_plugins": [name], "max_hf3fs_size": 1.0}
    engine, generate, statistics = engine_of(model, settings), ["generate", prompts], ["statistics"]
    steps = [generate, ["flush"], ["clear_hot"], generate, statistics]
    (_, flushed, _, loaded, written), _ = drive(engine, steps, environment)
    assert flushed
    steps = [["scanned"], generate, statistics, ["corrupt_hot"], generate]
    (_, restored, read, _, wrong), _ = drive(engine, steps, environment)
    chunks = written["writers"][name]["written"]
    assert written["tiers"][name]["reads"] == read["tiers"][name]["reads"] == chunks >= 8
    assert_hits(loaded, oracle)
    assert_hits(restored, oracle)
    assert_wrong_hits(wrong, oracle)


SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 20}, "pages": {"enum": [1, 20, 300]}},
    "required": ["title", "pages"],
    "additionalProperties": False,
}
WIDTH, BEAM_TOKENS = 3, 6


def test_structured_answers_and_beams(model: str, prompts: list[str], continued: str, tmp_path: Path) -> None:
    """With what lies on the disk they are those of the prefix cache."""
    engine: dict[str, Any] = {"model": model, "max_logprobs": 2 * WIDTH}
    engine["structured_outputs_config"] = {"disable_any_whitespace": True, "backend": "xgrammar"}
    compute = ["generate", [*prompts, continued]]
    asked = [["generate_structured", prompts[0], {"json": SCHEMA}, 80], ["beam_search", continued, WIDTH, BEAM_TOKENS]]
    (*_, theirs, their_beams), _ = drive(engine | {"enable_prefix_caching": True}, [compute, *asked])
    ours = engine | {"enable_prefix_caching": False, "tiercache": tiercache_settings(tmp_path)}
    (*_, hit, beams), _ = drive(ours, [["loads_always"], compute, ["flush"], ["clear_hot"], *asked])

    assert hit["cached"] == (hit["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert_hits([hit], [theirs])
    assert json.loads(hit["text"]).keys() == {"title", "pages"}
    assert len({tuple(beam["tokens"]) for beam in beams}) == WIDTH
    assert [beam["tokens"] for beam in beams] == [beam["tokens"] for beam in their_beams]
    assert [beam["logprob"] for beam in beams] == pytest.approx([beam["logprob"] for beam in their_beams], abs=1e-3)
