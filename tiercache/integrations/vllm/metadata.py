"""Messages between the halves: the work of a step for the workers, and their reports. vLLM pickles the messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tiercache.integrations.vllm.events import Changes
from tiercache.integrations.vllm.hints import Turn
from tiercache.integrations.vllm.logs import Trace
from tiercache.integrations.vllm.planning import BlockTransfer


@dataclass
class Load:
    request_id: str
    transfers: list[BlockTransfer]
    asynchronous: bool
    claim: str = ""
    """The claim under which the chunks may be held until the load has ended."""
    impossible: tuple[int, ...] = ()
    """Blocks that the engine expects to be filled, but no transfer fills, because planning failed."""
    trace: Trace | None = None


@dataclass
class Save:
    request_id: str
    transfers: list[BlockTransfer]
    request_tokens: int
    trace: Trace | None = None
    to_be_forgotten: bool = False
    """True if the stored chunks are to be forgotten when the request has finished."""
    replaced: bytes = b""
    """The name of the tail that begins like the first of the stored chunks, if any: nothing needs it any more."""
    previous: bytes = b""
    """The name of the chunk before the first of the stored chunks, if all layers keep every token."""


@dataclass
class StepWork(KVConnectorMetadata):  # type: ignore[misc]
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    """Requests whose blocks are given away in this step: saves from these must have ended."""
    held: set[str] = field(default_factory=set)
    """Finished requests whose blocks stay until their saves have ended; the worker then reports them as sent."""
    given_away: set[int] = field(default_factory=set)
    """Blocks that requests get in this step, if windows free blocks of running requests: saves from these must have
    ended.
    """
    generation: bytes = b""
    """The new generation of names after a reset, which also empties the hot cache; see `BlockNames`."""
    token_s: float | None = None
    """Seconds that the engine takes to compute one more token; None if that has not changed."""
    watching: dict[bytes, bool] = field(default_factory=dict)
    """Names of the chunks to start (True) or stop (False) watching for routers."""
    turns: list[Turn] = field(default_factory=list)
    """Hints of requests, in the order in which the requests came and finished."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Saves and loads that have ended since the last step, and what routers are to be told."""

    saves: dict[str, int]
    """The number of `Save`s of each request, summed over workers."""
    loads: set[str]
    """Requests whose synchronous load has ended or failed. Every worker ends it in the same step."""
    residency: Changes | None = None
    """The report of rank 0."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReport)
        saves = dict(self.saves)
        for request_id, count in other.saves.items():
            saves[request_id] = saves.get(request_id, 0) + count
        return StepReport(saves, self.loads | other.loads, self.residency or other.residency)
