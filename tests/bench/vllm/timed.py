"""Our connector, and how long the scheduler is in it at each step. vLLM loads it instead of ours.

A step's time is that of every call since the step before, by the wall clock: what vLLM's scheduler does not do meanwhile.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.bench.vllm.steps import STEPS_FILE
from tiercache.integrations.vllm import TierCacheConnector


def _timed(name: str) -> Any:
    method = getattr(TierCacheConnector, name)

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(self, *arguments, **named)
        finally:
            self.spent_s += time.perf_counter() - began

    return call


class TimedConnector(TierCacheConnector):
    """Writes a line for each step to the file that STEPS_FILE names: requests that wait, and seconds."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.spent_s = 0.0
        self._waiting: set[str] = set()
        self._file = -1
        if role == KVConnectorRole.SCHEDULER:
            self._file = os.open(os.environ[STEPS_FILE], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    get_num_new_matched_tokens = _timed("get_num_new_matched_tokens")
    update_connector_output = _timed("update_connector_output")
    has_pending_block_frees = _timed("has_pending_block_frees")
    has_pending_push_work = _timed("has_pending_push_work")
    get_external_cache_hit_sources = _timed("get_external_cache_hit_sources")
    get_kv_connector_stats = _timed("get_kv_connector_stats")
    _on_new_request = _timed("on_new_request")
    _update_state_after_alloc = _timed("update_state_after_alloc")
    _build_connector_meta = _timed("build_connector_meta")
    _request_finished = _timed("request_finished")
    _request_finished_all_groups = _timed("request_finished_all_groups")

    def on_new_request(self, request: Any) -> None:
        self._waiting.add(request.request_id)
        self._on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._waiting.discard(request.request_id)
        self._update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._waiting.discard(request.request_id)
        return self._request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._waiting.discard(request.request_id)
        return self._request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        work = self._build_connector_meta(scheduler_output)
        spent_s, self.spent_s = self.spent_s, 0.0
        os.write(self._file, f"{len(self._waiting)} {spent_s:.7f}\n".encode())
        return work

    def shutdown(self) -> None:
        super().shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
