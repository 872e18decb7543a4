"""Find the source of a hit in the lines that the connector logs for every request."""

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
    """Tokens of a request: in total, in the engine's own prefix cache, in the tiers, and to be loaded from tiers."""

    total_tokens: int
    engine_tokens: int
    hit_tokens: int
    tokens_by_tier: dict[str, int]
    load_tokens: int

    @property
    def source(self) -> str:
        """The source of the KV: `vllm`, the names of the tiers, both joined by `+`, or an empty text."""
        sources = ["vllm"] if self.engine_tokens else []
        if self.load_tokens:
            sources += [tier for tier, tokens in self.tokens_by_tier.items() if tokens]
        return "+".join(sources)


def found_for(request_id: str, log: str) -> Found | None:
    """Return the newest logged counts of the request, or None. vLLM adds a suffix to the id that the client sees."""
    lines = re.findall(_HITS.format(request=re.escape(request_id)), log)
    if not lines:
        return None
    total, engine, hit, tiers, load = lines[-1]
    by_tier = {name.strip(): int(tokens) for name, tokens in (part.split(":") for part in tiers.split(","))}
    return Found(int(total), int(engine), int(hit), by_tier, int(load))


def stored_tokens(request_id: str, log: str) -> int:
    """Return how many tokens of the request have been stored; each step of a prefill logs its own line."""
    return sum(int(count) for count in re.findall(_STORED.format(request=re.escape(request_id)), log))
