"""Find the source of a hit in the lines that the connector logs for every request."""

from __future__ import annotations

import re

_HITS = (
    r"Reqid: {request}\S*, Total tokens \d+, engine computed tokens: (\d+), "
    r"hit tokens: \d+ \(([^)]*)\), need to load: (\d+)"
)
_STORED = r"Stored (\d+) out of total \d+ tokens for request {request}"


def source_of(request_id: str, log: str) -> str:
    """Return the source of a request's KV: `vllm`, the names of the tiers, both joined by `+`, or an empty text.

    vLLM adds a suffix to the id that the client sees. The newest line of the request counts.
    """
    lines = re.findall(_HITS.format(request=re.escape(request_id)), log)
    if not lines:
        return ""
    engine_tokens, tiers, load_tokens = lines[-1]
    sources = ["vllm"] if int(engine_tokens) else []
    if int(load_tokens):
        by_tier = [part.split(":") for part in tiers.split(",")]
        sources += [name.strip() for name, tokens in by_tier if int(tokens)]
    return "+".join(sources)


def stored_tokens(request_id: str, log: str) -> int:
    """Return how many tokens of the request have been stored; each step of a prefill logs its own line."""
    return sum(int(count) for count in re.findall(_STORED.format(request=re.escape(request_id)), log))
