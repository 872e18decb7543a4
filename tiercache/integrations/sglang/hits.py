"""Which prefixes of a request can be restored, from what its pools have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolPages:
    """What a pool beside the KV has of the pages of a prefix.

    Without a `window` every page of a prefix is needed, with one the last so many: a state at its end is a window of 1.
    """

    name: str
    present: Sequence[bool]
    window: int | None = None

    def restorable(self, pages: int) -> list[int]:
        """Lengths of prefixes, in pages and ascending, of which the pool has what it takes."""
        if self.window is None:
            first_gap = next((page for page in range(pages) if not self.present[page]), pages)
            return list(range(1, first_gap + 1))
        found, run = [], 0
        for page in range(pages):
            run = run + 1 if self.present[page] else 0
            if run >= min(self.window, page + 1):
                found.append(page + 1)
        return found


@dataclass(frozen=True)
class Restorable:
    """`pages` of KV can be used; `by_pool` is how far each pool reaches by itself, `prefixes`
    are all lengths that could be."""

    pages: int
    by_pool: dict[str, int]
    prefixes: list[int]


def restorable(kv_pages: int, pools: Sequence[PoolPages]) -> Restorable:
    """Of a prefix whose KV is there for `kv_pages`. A pool that reaches nowhere is in no `by_pool`."""
    by_pool: dict[str, int] = {}
    prefixes = list(range(1, kv_pages + 1))
    for pool in pools:
        lengths = pool.restorable(kv_pages)
        if lengths:
            by_pool[pool.name] = lengths[-1]
        here = set(lengths)
        prefixes = [length for length in prefixes if length in here]
    return Restorable(prefixes[-1] if prefixes else 0, by_pool, prefixes)
