"""Where a hit came from, read from the lines that the connector logs for every request."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HITS = (
    r"Reqid: {request}\S*, Total tokens (\d+), engine computed tokens: (\d+), "
    r"hit tokens: (\d+) \(([^)]*)\), need to load: (\d+)"
)
_STORED = r"Stored (\d+) out of total \d+ tokens for request {request}"


@dataclass(frozen=True)
class Found:
    """Tokens of one request: in all, in the engine's own prefix cache, in our tiers, and to be loaded from them."""

    total_tokens: int
    engine_tokens: int
    hit_tokens: int
    tokens_by_tier: dict[str, int]
    load_tokens: int

    @property
    def source(self) -> str:
        """Who supplied the KV: `vllm`, the names of our tiers, both joined by `+`, or nothing."""
        sources = ["vllm"] if self.engine_tokens else []
        if self.load_tokens:
            sources += [tier for tier, tokens in self.tokens_by_tier.items() if tokens]
        return "+".join(sources)


def found_for(request_id: str, log: str) -> Found | None:
    """The newest line about the request. vLLM adds a suffix of its own to the id that the client sees."""
    lines = re.findall(_HITS.format(request=re.escape(request_id)), log)
    if not lines:
        return None
    total, engine, hit, tiers, load = lines[-1]
    by_tier = {name.strip(): int(tokens) for name, tokens in (part.split(":") for part in tiers.split(","))}
    return Found(int(total), int(engine), int(hit), by_tier, int(load))


def stored_tokens(request_id: str, log: str) -> int:
    """How many tokens of the request the connector has stored so far; each step of a prefill has a line of its own."""
    return sum(int(count) for count in re.findall(_STORED.format(request=re.escape(request_id)), log))
