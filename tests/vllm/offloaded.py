"""vLLM's tiering manager above our tier, driven as vLLM's scheduler drives it, without an engine."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROW_BYTES = 8192
ROWS = 4
"""Of vLLM's CPU tier."""


def engine_of(model: Path, **engine: Any) -> Any:
    """vLLM's configuration of an engine that offloads."""
    from vllm.engine.arg_utils import EngineArgs

    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "block_size": 32,
        "enforce_eager": True,
        "dtype": "float32",
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return EngineArgs(model=str(model), kv_transfer_config=transfer, **(settings | engine)).create_engine_config()


def name_of(number: int, group: int = 0) -> bytes:
    """vLLM's, of a chunk."""
    from vllm.v1.kv_offload.base import make_offload_key

    return bytes(make_offload_key(bytes([number]) * 32, group))


def content_of(name: bytes) -> np.ndarray:
    random = np.random.default_rng(int.from_bytes(name[:4] + name[-4:], "big"))
    return random.integers(0, 256, ROW_BYTES, dtype=np.uint8)


class Offloaded:
    """A scheduler's half of vLLM's offloading, with one tier of ours below `ROWS` rows of memory."""

    def __init__(
        self, vllm_config: Any, directory: Path, rows: int = ROWS, events: bool = False, **settings: Any
    ) -> None:
        """`settings` are those of the tier. The tier finds `vllm_config` here, as it finds it in vLLM's connector."""
        from vllm.v1.kv_offload.config import (
            OffloadingCacheConfig,
            OffloadingConfig,
            OffloadingGroupConfig,
            OffloadingModelConfig,
            OffloadingParallelConfig,
        )

        from tiercache.integrations.vllm_offloading import CpuTieringSpec

        parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
        tier = {
            "type": "TierCacheTier",
            "module_path": "tiercache.integrations.vllm_offloading",
            "max_local_cpu_size": 0.01,
            "local_disk": str(directory),
            "max_local_disk_size": 1.0,
            "device": "none",
        }
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(32, ("layer",), 0),),
            worker_kv_bytes_per_block=ROW_BYTES,
            enable_kv_cache_events=events,
            extra_config={"cpu_bytes_to_use": rows * ROW_BYTES, "secondary_tiers": [tier | settings]},
            engine_id=vllm_config.kv_transfer_config.engine_id,
            model=OffloadingModelConfig("model", "float32"),
            cache=OffloadingCacheConfig(32, 1),
            parallel=parallel,
            kv_cache_layout="LBHNC",
        )
        self.manager: Any = CpuTieringSpec(config).get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._contexts: dict[str, Any] = {}

    def request(self, request_id: str, **said: Any) -> Any:
        """A new one, which says so in its `kv_transfer_params`."""
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(request_id, {f"tiercache.{name}": value for name, value in said.items()} or None)
        self._contexts[request_id] = context
        self.manager.on_new_request(context)
        return context

    def finish(self, request_id: str) -> None:
        self.manager.on_request_finished(self._contexts.pop(request_id))
        self.step()

    def place(self, names: Sequence[bytes], context: Any) -> None:
        for number, name in enumerate(names):
            context.set_offload_key_position(name, 32 * (number + 1))

    def store(self, names: Sequence[bytes], context: Any) -> None:
        """The engine has computed these, and its worker has copied them into vLLM's CPU tier."""
        self.place(names, context)
        output = self.manager.prepare_store(names, context)
        assert output is not None
        for name, row in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
            self.rows[row] = content_of(name)
        self.manager.complete_store(set(output.keys_to_store), context)

    def find(self, names: Sequence[bytes], context: Any, steps: int = 20) -> int:
        """As vLLM asks for a prefix: how many of `names` are in its CPU tier at last."""
        from vllm.v1.kv_offload.base import LookupResult

        self.place(names, context)
        for _ in range(steps):
            hits, waits = 0, False
            for name in names:
                result = self.manager.lookup(name, context)
                if result is LookupResult.MISS:
                    break
                waits = waits or result is not LookupResult.HIT
                hits += result in (LookupResult.HIT, LookupResult.HIT_PENDING)
            if not waits:
                return hits
            self.step()
        raise AssertionError("the scheduler asks again and again")

    def content(self, names: Sequence[bytes], context: Any) -> list[np.ndarray]:
        """What the engine would load from vLLM's CPU tier."""
        spec = self.manager.prepare_load(names, context)
        found = [self.rows[row].copy() for row in spec.block_ids.tolist()]
        self.manager.complete_load(names, context)
        return found

    def step(self) -> None:
        """The end of a scheduler's step; then all that it has begun ends, and the next step sees it."""
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.settle()
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Until questions are answered, transfers have ended, and every chunk is in its tiers."""
        tier = self.tier
        assert not concurrent.futures.wait([*tier._lookups, *tier._jobs], 30).not_done
        assert tier.thread.submit(tier.thread.cache.flush(30)).result(40).complete

    def forget_memory(self) -> None:
        """vLLM's CPU tier and our hot cache are empty, as after a long time with other requests."""
        self.step()
        self.manager.primary_tier.reset_cache()
        self.rows[:] = 0

        async def clear() -> None:
            self.tier.thread.cache.clear_hot()

        self.tier.thread.submit(clear()).result(10)

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()
