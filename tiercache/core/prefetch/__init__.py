"""What to bring into the hot cache before it is asked for."""

from __future__ import annotations

from tiercache.core.prefetch.plan import Fetch, PrefetchPlan, PrefetchSettings
from tiercache.core.prefetch.transfers import Account

__all__ = ["Account", "Fetch", "PrefetchPlan", "PrefetchSettings"]
