"""The chunks that were prefetched, and the account of what came of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from tiercache.core.keys import ChunkKey


@dataclass
class Account:
    """Bytes of one predictor. `fetched = used + late + evicted + wasted + what is still waiting to be used`."""

    fetched_bytes: int = 0
    """Whose transfer began."""
    used_bytes: int = 0
    """In the hot cache when they were asked for."""
    late_bytes: int = 0
    """Still on their way when they were asked for."""
    evicted_bytes: int = 0
    """Evicted before they were used."""
    wasted_bytes: int = 0
    """Not used by the time that the prediction allowed, or until the end, or before somebody removed them."""
    cancelled_bytes: int = 0
    """Planned and not fetched any more: asked for before, withdrawn, or expired. Cost nothing."""

    @property
    def lost_bytes(self) -> int:
        return self.evicted_bytes + self.wasted_bytes

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class Transfers:
    """Each chunk that is on its way, or in the hot cache and not used yet, with the predictor that it was fetched for."""

    def __init__(self, chunk_bytes: int) -> None:
        self.accounts: dict[str, Account] = {}
        """By predictor."""
        self.in_flight: dict[ChunkKey, str] = {}
        self.ready: dict[ChunkKey, str] = {}
        """Fetched and not used yet."""
        self._chunk_bytes = chunk_bytes

    @property
    def waiting_bytes(self) -> int:
        """In the hot cache or on the way, and not used yet."""
        return (len(self.ready) + len(self.in_flight)) * self._chunk_bytes

    def began(self, key: ChunkKey, predictor: str) -> None:
        self.in_flight[key] = predictor
        self._account(predictor).fetched_bytes += self._chunk_bytes

    def fetched(self, key: ChunkKey) -> None:
        """Its transfer has ended and it is in the hot cache."""
        predictor = self.in_flight.pop(key, None)
        if predictor is not None:
            self.ready[key] = predictor

    def failed(self, key: ChunkKey) -> None:
        """It could not be had, or there was no room; no byte is charged."""
        predictor = self.in_flight.pop(key, None)
        if predictor is not None:
            account = self._account(predictor)
            account.fetched_bytes -= self._chunk_bytes
            account.cancelled_bytes += self._chunk_bytes

    def cancelled(self, chunks: int, predictor: str) -> None:
        """They were planned and have not begun."""
        self._account(predictor).cancelled_bytes += chunks * self._chunk_bytes

    def asked(self, keys: Iterable[ChunkKey]) -> None:
        """A request needs `keys`: those that were fetched for it were used, those on their way are late."""
        ready, in_flight = self.ready, self.in_flight
        if not ready and not in_flight:
            return
        for key in keys:
            predictor = ready.pop(key, None)
            if predictor is not None:
                self._account(predictor).used_bytes += self._chunk_bytes
            elif key in in_flight:
                self._account(in_flight.pop(key)).late_bytes += self._chunk_bytes

    def evicted(self, key: ChunkKey) -> None:
        predictor = self.ready.pop(key, None)
        if predictor is not None:
            self._account(predictor).evicted_bytes += self._chunk_bytes

    def removed(self, key: ChunkKey) -> None:
        """Somebody removed it from the hot cache, or nobody expects it any more: it was fetched for nobody."""
        predictor = self.ready.pop(key, None)
        if predictor is not None:
            self._account(predictor).wasted_bytes += self._chunk_bytes

    def finish(self) -> None:
        """Nothing more will come: what was fetched and not used is wasted."""
        for predictor in (*self.ready.values(), *self.in_flight.values()):
            self._account(predictor).wasted_bytes += self._chunk_bytes
        self.ready.clear()
        self.in_flight.clear()

    def _account(self, predictor: str) -> Account:
        account = self.accounts.get(predictor)
        if account is None:
            account = self.accounts[predictor] = Account()
        return account
