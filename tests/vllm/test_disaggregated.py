"""An engine that computes prompts and one that generates: what the first says of what it stored, and examples/ for it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.examples import EXAMPLES
from tests.needs import takes_minutes
from tests.vllm.answers import same_answer
from tests.vllm.engines import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    drive,
    prompt_of,
    running_example,
    tiercache_settings,
    tiny_engine,
)
from tests.vllm.models import tiny_gemma
from tiercache.demo.server import MODEL_NAME, Server, quickest_dtype, serving

EXAMPLE = EXAMPLES / "disaggregated_prefill.py"


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("first", ["full", "sliding"])
def test_one_engine_computes_and_another_generates(tmp_path: Path, first: str) -> None:
    settings = tiercache_settings(tmp_path / "kv")
    engine = tiny_engine(tiny_gemma(tmp_path / "model", first, "full"), tiercache=settings)
    prompt = prompt_of(1, 300)
    say: Any = ["generate_saying", prompt]
    flushed = [["flush"], ["known_files", str(tmp_path / "kv")]]
    (computed, _, files), _ = drive(engine | {"kv_role": "kv_producer"}, [[*say, {}, None, 1], *flushed])
    said = computed["kv_transfer_params"]
    tokens = 300 // BLOCK_TOKENS * BLOCK_TOKENS if first == "full" else 300 // CHUNK_TOKENS * CHUNK_TOKENS
    assert said == {"tiercache.expect_tokens": tokens} and files
    unlike: Any = ["generate_saying", prompt_of(2, 300), {}]
    (found, other, _, left), _ = drive(engine | {"kv_role": "kv_consumer"}, [[*say, said], unlike, *flushed])
    assert found["cached"] == tokens and not other["cached"]
    assert sorted(left) == sorted(files), "a consumer stored something"
    (alone,), _ = drive({**engine, "tiercache": None}, [[*say, {}]])
    assert same_answer(found, alone)


@takes_minutes
def test_proxy_before_two_servers(tmp_path: Path) -> None:
    from tests.remote.redis import servers

    config, model = tmp_path / "tiercache.yaml", tiny_gemma(tmp_path / "model", "full", "full")
    asked: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    asked["return_token_ids"] = True

    def started(stack: ExitStack, name: str, role: str) -> Server:
        transfer = {"kv_connector": "TierCacheConnector", "kv_connector_module_path": "tiercache.integrations.vllm"}
        arguments = ["--skip-tokenizer-init", "--dtype", quickest_dtype(), "--max-model-len", "1024"]
        arguments += ["--kv-transfer-config", json.dumps(transfer | {"kv_role": role})]
        return stack.enter_context(serving(model, tmp_path / f"{name}.log", config, arguments=arguments))

    with ExitStack() as stack:
        redis = stack.enter_context(servers.running(tmp_path))
        config.write_text(
            "chunk_size: 64\nmax_local_cpu_size: 0.2\nremote_storage_plugins: [redis]\n"
            f"extra_config:\n  remote_storage_plugin.redis.url: redis://127.0.0.1:{redis.port}\n"
        )
        prefill, decode = started(stack, "prefill", "kv_producer"), started(stack, "decode", "kv_consumer")
        proxied = running_example(EXAMPLE, tmp_path / "proxy.log", "--prefill", prefill.url, "--decode", decode.url)
        url, client = stack.enter_context(proxied), stack.enter_context(httpx.Client(timeout=300, trust_env=False))
        for number in range(5):
            asked |= {"prompt": prompt_of(number, 900)["prompt_token_ids"]}
            answer = client.post(f"{url}/v1/completions", json=asked).raise_for_status().json()
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 896 - 128, usage
            decode.forget_prefix_cache()
            right = client.post(f"{prefill.url}/v1/completions", json=asked).json()
            assert answer["choices"][0]["token_ids"] == right["choices"][0]["token_ids"]
