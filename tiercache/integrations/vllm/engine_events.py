"""KV events as vLLM has them: what is read of a request for them, what workers send, and what is published."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVConnectorKVEvents
from vllm.v1.core import kv_cache_utils

from tiercache.integrations.vllm.grouped import name_of
from tiercache.integrations.vllm.kv_events import AnnouncedBlocks, ChunkBlocks, Removed, Report, Stored
from tiercache.integrations.vllm.logs import survives
from tiercache.integrations.vllm.planning import BlockGeometry, BlockTransfer, KvGroup

if TYPE_CHECKING:
    from vllm.v1.request import Request

_FIELDS = frozenset(BlockStored.__struct_fields__)
_LOCALITY = {"locality": "LOCAL"} if "locality" in _FIELDS else {}
"""Older vLLMs say nothing about that."""


_LINGER_S = 1.0


class ResidencyChanges(KVConnectorKVEvents):  # type: ignore[misc]
    """What workers send with a step: a `Report` each. What one says has not to wait for what another one says."""

    def __init__(self, report: Report) -> None:
        self._reports: list[Report] = [report]
        self._workers = 1

    def add_events(self, events: list[Any]) -> None:
        self._reports += events

    def aggregate(self) -> ResidencyChanges:
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._workers += count

    def get_all_events(self) -> list[Any]:
        return self._reports

    def get_number_of_workers(self) -> int:
        return self._workers

    def clear_events(self) -> None:
        self._reports.clear()


class KvEvents:
    """The scheduler's half. Of groups with a window nothing is told: what they keep is of use at the end of a hit only."""

    def __init__(self, geometry: BlockGeometry, groups: Sequence[KvGroup], hash_tokens: int) -> None:
        """`groups` as transfers count them; each of a request's block hashes stands for `hash_tokens`."""
        self.announced = AnnouncedBlocks()
        self._geometry = geometry
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._kinds = {group.index: _kind_of(group) for group in groups}
        self._busy: set[int] = set()
        """Ranks that may soon have more to say."""
        self._reported_s = 0.0

    @property
    def wants_step(self) -> bool:
        """One more step is worth having, though no request needs it: events go out with steps, and what was written since
        the last one, and evicted for it, would be told only with the next request. Not for long where a tier hangs."""
        return bool(self._busy) and time.monotonic() - self._reported_s < _LINGER_S

    def reported(self, reports: Sequence[Report]) -> None:
        self._reported_s = time.monotonic()
        for report in reports:
            self.announced.changed(report.changes)
            (self._busy.add if report.is_busy else self._busy.discard)(report.rank)

    @survives(lambda: None)
    def moves(self, request: Request, names: Sequence[bytes], first: int, transfers: Sequence[BlockTransfer]) -> None:
        """A request stores or loads these chunks, of which none lies before block `first`."""
        geometry = self._geometry
        start = geometry.whole_chunks(first)
        ends = {name: end for end, name in enumerate(names[start:], start + 1)} if transfers else {}
        for transfer in transfers:
            group = self._groups[transfer.group]
            # Of the parts of a rank, which come and go together, the last says it for all.
            tells = group.window_tokens is None and (geometry.parts is None or group.part == geometry.parts.here - 1)
            if tells and not self.announced.knows(transfer.name):
                suffix = name_of(b"", transfer.group, geometry)
                name = transfer.name.removesuffix(suffix) if suffix else transfer.name
                end = ends[name]
                blocks = geometry.blocks_per_chunk if geometry.groups else transfer.chunk_blocks
                self.announced.know(transfer.name, self._described(request, transfer.group, end - blocks, end))

    def take(self) -> list[KVCacheEvent]:
        return [
            _removed(event) if isinstance(event, Removed) else _stored(event, self._kinds[event.chunk.group])
            for event in self.announced.take()
        ]

    def _described(self, request: Request, position: int, start: int, end: int) -> ChunkBlocks:
        """Blocks `start` .. `end` of the geometry's, as the group counts them."""
        group = self._groups[position]
        first_token, end_token = start * self._geometry.block_tokens, end * self._geometry.block_tokens
        step = group.block_tokens // self._hash_tokens
        first, stop = first_token // group.block_tokens, end_token // group.block_tokens
        hashes = request.block_hashes
        lora = request.lora_request
        extra = [
            kv_cache_utils.generate_block_hash_extra_keys(
                request, block * group.block_tokens, (block + 1) * group.block_tokens, 0
            )[0]
            for block in range(first, stop)
        ]
        return ChunkBlocks(
            tuple(hashes[(block + 1) * step - 1] for block in range(first, stop)),
            hashes[first * step - 1] if first else None,
            array("I", request.all_token_ids[first_token:end_token]),
            group.block_tokens,
            group.index,
            lora.adapter_id if lora is not None else None,
            lora.name if lora is not None else None,
            tuple(extra) if any(extra) else None,
        )


def _kind_of(group: KvGroup) -> dict[str, str]:
    """What vLLM's events say about such blocks."""
    if group.spec is None or "kv_cache_spec_kind" not in _FIELDS:
        return {}
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return {"kv_cache_spec_kind": get_kv_cache_spec_kind(group.spec).value}


def _stored(event: Stored, kind: dict[str, str]) -> KVCacheEvent:
    chunk, first = event.chunk, event.first
    parent = chunk.hashes[first - 1] if first else chunk.parent
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)  # older vLLMs have no tags
    return BlockStored(
        block_hashes=[kv_cache_utils.maybe_convert_block_hash(value) for value in chunk.hashes[first:]],
        parent_block_hash=None if parent is None else kv_cache_utils.maybe_convert_block_hash(parent),
        token_ids=chunk.tokens[first * chunk.block_tokens :].tolist(),
        block_size=chunk.block_tokens,
        lora_id=chunk.lora_id,
        medium=event.medium,
        lora_name=chunk.lora_name,
        # What the engine says of its own blocks has an entry a block, None for nothing.
        extra_keys=untagged(chunk.extra_keys[first:] if chunk.extra_keys else [None] * (len(chunk.hashes) - first)),
        group_idx=chunk.group,
        **kind,
        **_LOCALITY,
    )


def _removed(event: Removed) -> KVCacheEvent:
    hashes = [kv_cache_utils.maybe_convert_block_hash(value) for value in event.hashes]
    return BlockRemoved(block_hashes=hashes, medium=event.medium, group_idx=event.group, **_LOCALITY)
