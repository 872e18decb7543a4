"""Which pages are whose: by weights, adapters, what the server was told, and the part of the KV that a rank has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tests.sglang.pages import random_pages, tokens_of
from tests.sglang.process import in_sglang
from tests.sglang.stack import engine, mha_pools, storage_config
from tiercache.integrations.sglang.arguments import DO_NOT_COUNT, digest_of
from tiercache.integrations.sglang.identity import began_ns, identity_of_adapters, make_layout, model_of
from tiercache.integrations.sglang.pools import HostPool

LATER_NS = 3_000_000_000
"""Beyond the grain of a file system's clock."""


@in_sglang
def test_the_model_is_known_by_its_weights(tmp_path: Path) -> None:
    """Where SGLang's arguments say where they are: the same under another name, others under the same."""

    def server(name: str, weights: bytes) -> dict[str, Any]:
        place = tmp_path / name
        place.mkdir()
        (place / "model.safetensors").write_bytes(weights)
        (place / "config.json").write_text("{}")
        return {"model_path": str(place), "load_format": "auto"}

    one, same, other = server("one", b"w"), server("same", b"w"), server("other", b"v")
    named = [model_of("a-model", args) for args in (one, same, other)]
    assert named[0] == named[1] != named[2]
    assert model_of("m", None) == "name m"


@in_sglang
def test_what_the_server_was_told_keeps_pages_apart(tmp_path: Path) -> None:
    """As SGLang has resolved it, which its record of arguments does not say."""
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    (tmp_path / "model.safetensors").write_bytes(b"w")
    tokens = tokens_of(5, pages=2)

    def told(**more: Any) -> None:
        get_context()._server_args = ServerArgs(model_path=str(tmp_path), load_format="auto", **more)

    def found() -> torch.Tensor:
        with engine(tmp_path / "kv") as one:
            return one.load(tokens)

    told()
    with engine(tmp_path / "kv") as one:
        pages = random_pages(one.host, 2)
        one.store(tokens, pages)
    for more in ({"kv_cache_dtype": "fp8_e5m2"}, {"speculative_draft_model_path": "a draft"}, {"kt_method": "BF16"}):
        told(**more)
        assert len(found()) == 0
    told(served_model_name="a name")
    assert torch.equal(found(), pages)
    get_context()._server_args._resolved_overrides = [("a test", {"attention_backend": "triton"})]
    assert len(found()) == 0


@in_sglang
def test_an_adapter_that_was_replaced_at_its_path_finds_nothing(tmp_path: Path) -> None:
    """SGLang names its pages by name and path, so they have the same hashes. These files are as new as the process: nobody
    can know which of them the engine has loaded."""
    from sglang.srt.arg_groups.lora_hook import check_lora_server_args
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    (tmp_path / "model.safetensors").write_bytes(b"w")
    adapter = tmp_path / "sql"
    adapter.mkdir()
    tokens = tokens_of(5, pages=2)
    server = ServerArgs(model_path=str(tmp_path), load_format="auto", enable_lora=True, lora_paths=[f"sql={adapter}"])
    check_lora_server_args(server)
    get_context()._server_args = server
    (resolved,) = get_context().resolved_server_args_dict()["lora_paths"]
    assert (resolved["lora_name"], resolved["lora_path"]) == ("sql", str(adapter))
    (adapter / "adapter_model.safetensors").write_bytes(b"Monday")
    with engine(tmp_path / "kv") as one:
        one.store(tokens, random_pages(one.host, 2))
        assert len(one.load(tokens)) == 2
    (adapter / "adapter_model.safetensors").write_bytes(b"Tuesday")
    with engine(tmp_path / "kv") as one:
        assert len(one.load(tokens)) == 0


def test_adapters_are_known_by_name_path_and_content(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"

    def identity(*names: str) -> str:
        adapters = [{"lora_name": name, "lora_path": str(tmp_path)} for name in names]
        return identity_of_adapters(adapters, None, time.time_ns() + LATER_NS)

    weights.write_bytes(b"Monday")
    one = identity("sql")
    assert one == identity("sql") != identity("another")
    assert identity() == identity_of_adapters(None, None, 0) == ""
    weights.write_bytes(b"Tuesday")
    assert identity("sql") != one


def test_an_adapter_of_which_nobody_knows_what_was_loaded_is_like_no_other(tmp_path: Path) -> None:
    """Changed after the engine began, not files at all, without weights, or said in an unknown form."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"w")
    (tmp_path / "empty").mkdir()
    now_ns = time.time_ns()
    unknown: list[tuple[Any, int]] = [
        ({"lora_name": "sql", "lora_path": str(tmp_path)}, now_ns - LATER_NS),
        ({"lora_name": "sql", "lora_path": "a/name"}, now_ns + LATER_NS),
        ({"lora_name": "sql", "lora_path": str(tmp_path / "empty")}, now_ns + LATER_NS),
        (str(tmp_path), now_ns + LATER_NS),
    ]
    for adapter, since_ns in unknown:
        assert identity_of_adapters([adapter], None, since_ns) != identity_of_adapters([adapter], None, since_ns)


def test_a_process_knows_when_it_began(tmp_path: Path) -> None:
    (tmp_path / "now").touch()
    assert 0 < began_ns() < (tmp_path / "now").stat().st_mtime_ns


@in_sglang
def test_every_argument_counts_but_those_that_are_known_to_be_harmless() -> None:
    """Of all that SGLang has; and what is called harmless is one of them."""
    from sglang.srt.server_args import ServerArgs

    names = set(ServerArgs.__struct_fields__)
    told = dict.fromkeys(names)
    assert names >= DO_NOT_COUNT
    assert {name for name in names if digest_of(told) == digest_of(told | {name: "other"})} == DO_NOT_COUNT
    assert digest_of(told) != digest_of(told | {"of_a_new_version": None})


def test_arguments_that_change_kv_are_not_called_harmless() -> None:
    """Those of which that was said before; `speculative_draft_load_format` decides on the weights of a draft, and so on."""
    changes = """
        dtype quantization quantization_param_path kv_cache_dtype load_format model_loader_extra_config model_impl
        json_model_override_args context_length is_embedding modelopt_quant attention_backend prefill_attention_backend
        decode_attention_backend mm_attention_backend mm_process_config linear_attn_backend mamba_ssm_dtype
        speculative_algorithm speculative_draft_kv_cache_dtype speculative_draft_model_quantization rl_quant_profile
        weight_version enable_page_major_kv_layout enable_dsa_cache_layer_split dllm_algorithm
        kt_weight_path kt_method kt_num_gpu_experts custom_weight_loader decrypted_config_file decrypted_draft_config_file
        modelopt_checkpoint_restore_path quantize_and_serve speculative_draft_load_format dllm_algorithm_config
        enable_lora max_lora_rank lora_target_modules uno_lora_path speculative_token_map init_expert_location
        enable_tf32_matmul model_config_parser language_model_only image_processor_backend disable_fast_image_processor
        trust_mm_content_hashes trust_remote_code forward_hooks rl_on_policy_target qsa_indexer_dtype
        enable_deepseek_v4_fp4_indexer prefill_kv_cache_dequant_dtype enable_precise_embedding_interpolation
        enable_int8_mamba_checkpoint enable_mamba_cache_stochastic_rounding swa_prefix_tails dsa_prefill_backend
        flashinfer_mxfp4_moe_precision enable_quant_communications
    """.split()  # noqa: SIM905
    assert DO_NOT_COUNT.isdisjoint(changes)


def test_files_that_arguments_name_count_by_their_content(tmp_path: Path) -> None:
    """Another may come to lie there: scales of the KV, a configuration, weights for the CPU, an adapter."""
    scales, weights, adapter = tmp_path / "scales.json", tmp_path / "int4", tmp_path / "uno"
    weights.mkdir()
    adapter.mkdir()
    told = {"quantization_param_path": str(scales), "kt_weight_path": str(weights), "uno_lora_path": str(adapter)}
    found = set()
    for file in (scales, weights / "model.safetensors", adapter / "adapter_model.bin"):
        for content in (b"1", b"other"):
            file.write_bytes(content)
            found.add(digest_of(told))
    assert len(found) == 6


def test_the_order_of_a_set_is_no_difference() -> None:
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)
    assert digest_of({"lora_target_modules": one}) == digest_of({"lora_target_modules": other})


@in_sglang
def test_kinds_of_ranks_are_told_apart(tmp_path: Path) -> None:
    """The second of two parts is others' heads, or other layers, or other tokens."""
    pools = [HostPool("kv", mha_pools()[1])]
    second_of_two = [{f"{kind}_rank": 1, f"{kind}_size": 2} for kind in ("tp", "pp", "attn_cp")]
    two_kinds = {"attn_cp_rank": 0, "attn_cp_size": 2, "tp_rank": 1, "tp_size": 2}
    ranks = [*second_of_two, {"tp_rank": 1, "tp_size": 4}, two_kinds]
    layouts = [make_layout(storage_config(**rank), pools, 16, "id") for rank in ranks]
    assert len({layout.fingerprint for layout in layouts}) == len(ranks)
    same = [make_layout(storage_config(is_mla_model=True, tp_rank=rank, tp_size=2), pools, 16, "id") for rank in (0, 1)]
    assert same[0].fingerprint == same[1].fingerprint
