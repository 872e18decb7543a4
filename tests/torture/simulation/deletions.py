"""What others delete beside a running cache, and what a tier on files may believe of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiercache.cache import TierCache
from tiercache.scheduler.writer import TierWriter
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.remote.base import RemoteTier


class Deletions:
    """Of one cache. Until a read or a scan finds that a file is gone, a put of its chunk counts as stored, as
    docs/reliability.md says. A put that begins when no tier believes in it any more is a put like all others."""

    def __init__(self, cache: TierCache, keys: Sequence[bytes]) -> None:
        self._cache = cache
        self._keys = keys
        self._believed_s: dict[int, float] = {}
        """When each key's file was deleted, or a later put of it began in which a tier might still believe in it."""

    def __contains__(self, key: int) -> bool:
        """Whether its file was deleted, and no put has stored it since that no tier took for stored already."""
        return key in self._believed_s

    def happened(self, keys: Iterable[int], now_s: float) -> None:
        """Others have deleted the files of these keys."""
        self._believed_s.update(dict.fromkeys(keys, now_s))

    def put_begins(self, keys: Iterable[int], now_s: float) -> None:
        for key in keys:
            if key in self._believed_s and any(
                _may_believe(writer, self._keys[key]) for writer in self._cache.parts.fan_out.writers
            ):
                self._believed_s[key] = now_s

    def stored(self, key: int, began_s: float) -> None:
        """A put has stored it that began then."""
        if not self.mislead(key, began_s):
            self._believed_s.pop(key, None)

    def mislead(self, key: int, began_s: float) -> bool:
        """Whether a put that began then may have left it to a file that is gone."""
        return self._believed_s.get(key, float("-inf")) >= began_s


def _may_believe(writer: TierWriter, name: bytes) -> bool:
    """Whether it has the chunk, or gets it, or is just looking what there is and may have seen it before."""
    tier = writer.tier
    if isinstance(tier, RemoteTier):
        return False
    looks = bool(tier.traffic.questions) or name in tier.traffic.in_flight
    if isinstance(tier, FileTier):
        looks |= any(directory.scanning for directory in tier.directories.all)
        looks |= any(refresher.begun != refresher.ended for refresher in tier.lookup.refreshers.values())
    return looks or tier.offers(name) or writer.holds(name)
