"""Select the arguments of SGLang's server that may change KV: all except those known to be harmless.

Arguments of new versions are included by default. A needless argument costs hits when it changes; a missing argument
would cause wrong answers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tiercache.integrations.model_files import NothingToRead, identity_of_adapter, identity_of_model

_BY_CONTENT = (
    "model_path", "revision", "download_dir", "speculative_draft_model_path", "speculative_draft_model_revision",
    "lora_paths",
)  # fmt: skip
"""Arguments whose files are identified by content in the layout (`identity.py`)."""

_IN_LAYOUT = ("page_size", "tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size")
"""Arguments that the layout covers already: the page size, and how the KV is split among ranks."""

_HARMLESS = """
    host port grpc_port grpc_mode grpc_worker_threads grpc_response_timeout_secs smg_grpc_mode smg_http_sidecar_port
    fastapi_root_path sidecar sidecar_args enable_http2 http2_max_concurrent_streams
    http2_initial_connection_window_size enable_http_worker_reuseport ssl_keyfile ssl_certfile ssl_ca_certs
    ssl_keyfile_password enable_ssl_refresh api_key admin_api_key nccl_port dist_timeout dist_init_addr
    gated_launch_port engine_info_bootstrap_port nnodes node_rank ep_join_rank_offset base_gpu_id gpu_id_step numa_node
    use_ray load_balance_method enable_dp_attention_local_control_broadcast enable_p2p_check
    pp_max_micro_batch_size pp_async_batch_depth

    served_model_name chat_template trust_request_chat_template hf_chat_template_name completion_template
    file_storage_path enable_response_store tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num
    detokenizer_worker_num skip_tokenizer_init enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
    skip_server_warmup warmups enable_cache_report return_input_ids return_output_ids reasoning_parser
    default_chat_template_kwargs enable_strict_thinking tool_call_parser tool_server sampling_defaults
    preferred_sampling_params stream_interval batch_notify_size stream_response_default_include_usage
    incremental_streaming_output constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
    constrained_json_max_whitespace_cnt random_seed mlx_enable_sampling sampling_backend grammar_backend
    disable_outlines_disk_cache enable_custom_logit_processor sampling_mask_max_tokens enable_watermark
    watermark_config watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
    watermark_max_probability watermark_default_enabled watermark_enforce_all

    log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
    uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics
    enable_metrics_for_all_schedulers load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
    tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
    bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
    gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging kv_events_config
    load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name
    enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file
    export_metrics_to_file_dir stat_loggers debug_tensor_dump_output_folder debug_tensor_dump_layers spec_trace_dir
    expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode
    enable_layerwise_nvtx_marker watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler
    gc_threshold

    mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
    prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens
    prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
    default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
    priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness swa_full_tokens_ratio
    _swa_full_tokens_ratio_explicitly_set disable_overlap_schedule num_continuous_decode_steps
    scheduler_recv_interval max_mamba_cache_size mamba_full_memory_ratio enable_prefill_delayer
    prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
    prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
    prefill_delayer_max_delay_ms min_free_slots_delay radix_eviction_policy _radix_eviction_policy_explicitly_set
    radix_eviction_policy_config disable_radix_cache enable_session_radix_cache radix_cache_backend
    enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
    max_loaded_loras max_loras_per_batch lora_eviction_policy enable_lora_overlap_loading lora_drain_wait_threshold

    enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction
    hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend
    hicache_storage_prefetch_policy hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
    hicache_storage_prefetch_retry_max_attempts enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file
    enable_unified_cache_external_linker unified_cache_external_linker_backend unified_cache_external_linker_config

    cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
    cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
    cuda_graph_prefill_max_context disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
    disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph pre_warm_nccl
    kt_cpuinfer kt_threadpool_count cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step
    offload_mode

    weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    weight_loader_drop_cache_after_load weight_cache_socket weight_cache_timeout
    checkpoint_engine_wait_weights_before_ready modelopt_checkpoint_save_path modelopt_export_path

    disaggregation_mode disaggregation_transfer_backend disaggregation_enable_kv_checksum
    disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_enable_radix_cache
    disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup
    disaggregation_decode_extra_slots disaggregation_decode_polling_interval
    disaggregation_decode_allocation_policy disaggregation_decode_host_receive_threshold enable_pd_role_switch
    num_reserved_decode_tokens optimistic_prefill_attempts decoupled_spec_bind_endpoint
    decoupled_spec_connect_endpoints decoupled_spec_rank encoder_transfer_backend encoder_urls encoder_bootstrap_port
    encoder_register_urls enable_adaptive_dispatch_to_encoder mooncake_ib_device elastic_ep_scale_timeout

    enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_processor_worker_num mm_io_worker_num
    allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb limit_mm_data_per_request
    enable_mm_global_cache mm_global_cache_backend mm_feature_transport
"""
"""Arguments that do not change the KV of given tokens: addresses, names and keys; templates and sampling (they only choose
the tokens); logs and metrics; scheduling and memory sizes; storage; CUDA graphs; loading of weights; other servers; media.
"""
DO_NOT_COUNT = frozenset((*_BY_CONTENT, *_IN_LAYOUT, *_HARMLESS.split()))

_PATHS = ("_path", "_file", "_config", "_location", "_map")
"""Suffixes of arguments that may name a file in the working directory."""


def arguments_in_effect() -> Mapping[str, Any] | None:
    """Return the resolved arguments of this process's SGLang server; None if the process runs no server."""
    try:
        from sglang.srt.runtime_context import get_context

        found: Mapping[str, Any] = get_context().resolved_server_args_dict()
    except (ImportError, ValueError):
        return None
    return found


def digest_of(arguments: Mapping[str, Any]) -> str:
    """Return 32 hex digits over all included arguments and the contents of the files that they name. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arguments.keys() - DO_NOT_COUNT):
        value = arguments[name]
        digest.update(repr((name, _ordered(value), _contents(name, value))).encode(errors="backslashreplace"))
    return digest.hexdigest()


def _ordered(value: Any) -> Any:
    """Return `value` in a fixed order, since the order of a set differs between runs."""
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_ordered(one)) for one in value)
    if isinstance(value, Mapping):
        return sorted((repr(key), _ordered(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return [_ordered(one) for one in value]
    return value


def _contents(name: str, value: Any) -> list[str]:
    """Return digests of the files that a value names, since their contents may change under the same path."""
    texts = value if isinstance(value, (list, tuple)) else [value]
    named = [text for text in texts if isinstance(text, str) and (os.sep in text or name.endswith(_PATHS))]
    found = []
    for place in (Path(text).expanduser() for text in named):
        if place.exists():
            for identity in (partial(identity_of_model, load_format="any", with_code=True), identity_of_adapter):
                with suppress(NothingToRead, NotADirectoryError):
                    found.append(identity(place))
    return found
