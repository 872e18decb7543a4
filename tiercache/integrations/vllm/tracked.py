"""What the scheduler's half knows of a request."""

from __future__ import annotations

import concurrent.futures
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiercache.integrations.vllm.lookup import LookUp
from tiercache.integrations.vllm.planning import Match
from tiercache.integrations.vllm.turns import Wishes

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class TrackedRequest:
    """A request that the engine knows and has not finished."""

    request: Request
    names: list[bytes] = field(default_factory=list)
    lookup: LookUp | None = None
    claim: str = ""
    """Of the look-up, under which what it found may be held."""
    asked_at_s: float = 0.0
    ask_again_at_s: float = 0.0
    """Not before; where more is expected than was found."""
    pause_s: float = 0.0
    put_off_at_s: float | None = None
    """When the engine was first told to come again for the answer."""
    match: Match | None = None
    admitted: bool = False
    logged: bool = False
    load_from: int = 0
    loads_later: bool = True
    """While other requests compute, as the engine was told when it was told how much there is."""
    loaded_blocks: frozenset[int] = frozenset()
    load_failed: bool = False
    receiving: bool = False
    """An asynchronous load is under way: the engine holds the blocks until it has ended."""
    saved_blocks: int = 0
    """This many blocks from the start need no save: they are saved, or came out of the cache."""
    tail_saved: bool = False
    saves_begun: int = 0
    saves_ended: int = 0
    wishes: Wishes = field(default_factory=Wishes)
    arrived_s: float = field(default_factory=time.monotonic)
    adapter: concurrent.futures.Future[bytes] | None = None
    adapter_key: bytes = b""
    """What the names of its blocks have of its LoRA adapter, once any were given."""
    began: bool = False
    """The workers were told of it, if it wishes anything."""
    stale: bool = False
    """Its KV was computed before the cache was reset, perhaps with other weights."""
