"""What the scheduler's half tells the worker's half each step, and what comes back. Pickled by vLLM between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tiercache.integrations.vllm.planning import Transfer


@dataclass
class Load:
    request_id: str
    transfers: list[Transfer]
    asynchronous: bool


@dataclass
class Save:
    request_id: str
    transfers: list[Transfer]
    request_tokens: int


@dataclass
class StepWork(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    """Their blocks are given away in this step: saves from them must have ended."""
    held: set[str] = field(default_factory=set)
    """Finished requests whose blocks wait for their saves; to be reported as sent when those have ended."""
    forget_hot: bool = False


@dataclass
class SavesEnded(KVConnectorWorkerMetadata):
    """How many `Save`s of each request have ended, summed over workers."""

    counts: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, SavesEnded)
        counts = dict(self.counts)
        for request_id, count in other.counts.items():
            counts[request_id] = counts.get(request_id, 0) + count
        return SavesEnded(counts)
