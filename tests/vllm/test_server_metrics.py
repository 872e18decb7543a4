"""The real OpenAI server of vLLM's CPU build: its own /metrics and its log say what the cache counts."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.vllm.engines import REPOSITORY
from tiercache.control.client import ask
from tiercache.control.messages import Statistics
from tiercache.core.estimate import Distribution
from tiercache.demo.server import MODEL_NAME, Server, open_url, quickest_dtype, serving
from tiercache.integrations.vllm.metrics import EXPORTED, SAMPLED

CONFIG = """\
chunk_size: 128
max_local_cpu_size: {cpu_gb}
local_disk: {directory}/kv
max_local_disk_size: 1.0
control_socket: {socket}
enable_p2p: false
"""
"""In RAM there is room for five chunks of the shortened model (seven in bfloat16), and the prompts have nine."""
CPU_GB = 0.0045 if quickest_dtype() == "float32" else 0.0035
CHUNK_TOKENS = 128
SHORT = "Hi"
"""Less than a block: no chunk comes or goes for it, and a step is taken."""

Found = dict[str, dict[tuple[str, ...], float]]


class Asked(NamedTuple):
    server: Server
    exported: Found
    counted: Found
    """At the same time, by the cache itself."""
    bytes_per_token: float


def complete(server: Server, prompt: str) -> str:
    """Returns the id under which the connector's log knows the request."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with open_url(request, timeout=120) as answer:
        return str(json.load(answer)["id"])


def exported(server: Server) -> Found:
    """By family and the values of its labels, sorted, without vLLM's own two: value, or a histogram's count."""
    with open_url(f"{server.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = family.name if sample.name != f"{family.name}_sum" else sample.name
            if sample.name in (f"{family.name}_created", f"{family.name}_bucket"):
                continue
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            found.setdefault(name, {})[tuple(sorted(labels.values()))] = sample.value
            if name in EXPORTED:
                assert (sample.labels["model_name"], sample.labels["engine"]) == (MODEL_NAME, "0")
    return found


def counted(socket: Path) -> tuple[Found, float]:
    """What the cache itself says, by its control socket; and the bytes of a token."""
    figures = asyncio.run(ask(socket, Statistics()))
    return {
        family.name: {
            tuple(sorted(labels)): value.count if isinstance(value, Distribution) else value
            for labels, value in family.rows(figures)
        }
        for family in SAMPLED
    }, figures["chunk_bytes"] / CHUNK_TOKENS


def nonzero(found: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {labels: pytest.approx(value) for labels, value in found.items() if value}


@pytest.fixture(scope="module")
def asked(model: str, prompts: list[str], continued: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """A server that has computed prompts and loaded them, when both agree or after a minute."""
    place = tmp_path_factory.mktemp("server")
    socket, config = place / "c.sock", place / "tiercache.yaml"
    config.write_text(CONFIG.format(directory=place, socket=socket, cpu_gb=CPU_GB))
    licence = (REPOSITORY / "LICENSE").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOG_STATS_INTERVAL", "1")
        with serving(Path(model), place / "server.log", config) as server:
            for prompt in [*prompts, continued, licence[3000:4400], licence[8000:9400]] * 2:
                complete(server, prompt)
                server.forget_prefix_cache()
            until_s = time.monotonic() + 60
            while True:
                complete(server, SHORT)  # figures travel with steps, and the cache is looked at once a second
                (ours, bytes_per_token), theirs = counted(socket), exported(server)
                written = not ours["tiercache_writer_queued"][("disk",)] + ours["tiercache_writer_writing"][("disk",)]
                agreed = all(nonzero(ours[family.name]) == nonzero(theirs.get(family.name, {})) for family in SAMPLED)
                logged = "KV Transfer metrics" in server.log.read_text()
                if (agreed and written and logged) or time.monotonic() > until_s:
                    break
            yield Asked(server, theirs, ours, bytes_per_token)


def test_what_is_exported_is_what_the_cache_counts(asked: Asked) -> None:
    for family in SAMPLED:
        assert nonzero(asked.exported.get(family.name, {})) == nonzero(asked.counted[family.name]), family.name
    for labels, names in {
        ("disk",): """
            tiercache_tier_read_bytes tiercache_tier_written_bytes tiercache_tier_occupied_bytes tiercache_hits
            tiercache_hit_tokens tiercache_queried_tokens tiercache_read_seconds tiercache_write_seconds
            vllm:kv_offload_tiering_read_bytes vllm:kv_offload_tiering_write_bytes vllm:kv_offload_tiering_chunk_hits""",
        ("closed", "disk"): "tiercache_breaker tiercache_write_breaker",
        ("cpu",): "tiercache_tier_evicted",
        ("whole",): "tiercache_loads",
        (): """
            vllm:kv_offload_load_time vllm:kv_offload_load_size vllm:kv_offload_store_bytes vllm:kv_offload_store_time""",
    }.items():
        for name in names.split():
            assert asked.exported[name].get(labels, 0) > 0, (name, asked.exported[name])


def test_bytes_loaded_are_those_of_the_tokens_that_vllm_says_came_from_outside(asked: Asked) -> None:
    found = asked.exported
    tokens = sum(found["vllm:external_prefix_cache_hits"].values())
    assert tokens > 0
    assert found["vllm:kv_offload_load_bytes"][()] == tokens * asked.bytes_per_token
    assert sum(found["tiercache_hit_tokens"].values()) == tokens


def test_log_has_the_line_and_warns_once_of_what_is_not_honoured(asked: Asked) -> None:
    log = asked.server.log.read_text()
    lines = re.findall(r"KV Transfer metrics: (.*)", log)
    assert lines and all(line.startswith("Queried tokens=") for line in lines)
    assert sum(float(found) for line in lines for found in re.findall(r"Stored MB=([\d.]+)", line)) > 0
    assert log.count("accepted but not honoured: enable_p2p") == 1
