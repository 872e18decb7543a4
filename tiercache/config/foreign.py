"""LMCache keys that tiercache does not support: they are accepted and named in one warning.

The list comes from the table of lmcache 0.5.6 (lmcache/v1/config.py), its aliases, the keys that its code reads from
extra_config, and the keys in its documentation, some of which are older.
"""

from __future__ import annotations

_FOREIGN = """
    enable_p2p p2p_host p2p_init_ports p2p_lookup_ports p2p_max_retry_count transfer_channel mp_host mp_port
    enable_controller lmcache_instance_id controller_pull_url controller_reply_url controller_url controller_packages
    disabled_controllers heartbeat_url full_sync_batch_size kv_msg_batch_size kv_msg_batch_timeout
    lmcache_worker_ports lmcache_worker_port lmcache_worker_ids lmcache_worker_heartbeat_delay_time
    lmcache_worker_heartbeat_time
    enable_pd enable_xpyd pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port
    pd_peer_query_port pd_proxy_host pd_proxy_port pd_allocation_timeout_sec pd_shutdown_timeout_sec
    pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode pd_skip_proxy_notification pd_bidirectional
    nixl_backends nixl_buffer_size nixl_buffer_device nixl_peer_host nixl_peer_port nixl_peer_init_port
    nixl_peer_alloc_port nixl_proxy_host nixl_proxy_port nixl_role nixl_receiver_port
    enable_nixl_storage nixl_async_put nixl_backend nixl_backend_params nixl_enable_prog_thread nixl_endpoint_list
    nixl_path nixl_path_sharding nixl_pool_size nixl_presence_cache nixl_presence_cache_only nixl_sync_mode
    nixl_use_hugepages
    enable_blending blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens blend_special_str
    enable_sparse use_layerwise pre_caching_hash_algorithm
    maru_path maru_pool_size
    audit_actual_remote_url audit_calc_checksum audit_exclude_cmds audit_verify_checksum
    internal_api_server_host internal_api_server_enabled internal_api_server_port_start
    internal_api_server_include_index_list internal_api_server_socket_path_prefix
    runtime_plugin_locations plugin_locations storage_plugins external_backends
    external_lookup_client hit_miss_ratio lookup_server_worker_ids enable_scheduler_bypass_lookup lookup_backoff_time
    script_allowed_imports run_script_api_enabled py_enable_gc use_gpu_connector_v3 lmcache_rpc_port
    enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio lazy_memory_step_ratio
    lazy_memory_safe_size local_cpu.pinned_align_bytes gpu_to_numa_mapping
    enable_chunk_statistics chunk_statistics_auto_start_statistics chunk_statistics_auto_exit_timeout_hours
    chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy enable_kv_events
    remote_config_url app_id
    enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode
    first_rank_max_local_cpu_size audit_backend_enabled instrumented_connector_batched_get_time use_exists_sync
    remote_backend_batched_get_blocking_time bigtable_instance_id
    shared_memory_name max_lease_size_mb sagemaker_hyperpod_max_lease_size_mb sagemaker_hyperpod_shared_memory_name
    valkey_num_workers max_offload_tokens discard_partial_chunks ec
    save_chunk_meta save_only_first_rank force_store_wait
    fs_connector_read_ahead_size fs_connector_relative_tmp_dir
    transfer_timeout storage_root_dir resp_num_threads
    valkey_enable_ttl
    valkey_sync_num_workers
    s3_num_io_threads s3_prefer_http2
    azure_account_key azure_account_url azure_connection_string azure_sas_token
    sagemaker_hyperpod_bucket sagemaker_hyperpod_use_https
    s3_max_io_concurrency s3_max_inflight_reqs
    pd_retrieve_locations pd_store_location p2p_socket_recv_timeout_ms p2p_socket_send_timeout_ms
    distributed_url local_device pipelined_backend
    worker_socket_recv_timeout_ms worker_socket_send_timeout_ms
    internal_api_server_access_log internal_api_server_log_level
    enable_cache_usage_details_in_response remote_enable_mla_worker_id_as0
    store_location retrieve_locations pin_timeout_sec pin_check_interval_sec
    max_alloc_attempts allocation_attempt_delay_secs
    phx_path phx_path_sharding phx_buffer_size retrieve_buffer_size
"""

FOREIGN = frozenset(_FOREIGN.split())

FOREIGN_PREFIXES = (
    "bigtable_",
    "chunk_statistics_",
    "dax.",
    "ec_",
    "eic_",
    "ext_log_connector_",
    "external_backend.",
    "full_sync_",
    "lmcache.mp.",
    "maru_",
    "mooncake_",
    "mp.",
    "rust_raw_block.",
    "sagemaker_hyperpod_",
    "storage_plugin.",
)
"""Prefixes of keys that belong to LMCache's plugins and sidecars, or to stores that tiercache does not support."""

IGNORED = frozenset({"use_experimental"})
"""Keys accepted without a warning: LMCache's documentation still asks for them, and they have no effect here."""

_PROCESS_VARIABLES = """
    aerospike_hosts aerospike_namespace aerospike_password aerospike_set aerospike_username device_backend
    disable_banner force_skip_save gpu_staging_buffer_bytes log_level mq_timeout offload_rpc_port server_url
    track_usage usage_track_interval usage_track_url
"""
PROCESS_VARIABLES = frozenset(_PROCESS_VARIABLES.split())
"""LMCACHE_* variables that LMCache reads outside of its configuration."""

PROCESS_PREFIXES = (
    "controller_",
    "coordinator_",
    "ec_",
    "mp_",
    "musa_",
    "plugin_",
    "request_telemetry_",
    "resp_",
    "rocm_",
    "runtime_plugin_",
)
"""Prefixes of further variables that LMCache reads outside of its configuration."""
