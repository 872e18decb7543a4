"""The 3FS tier: the disk tier's files and rules on a 3FS mount, with payloads moved by rings instead of FUSE."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from tiercache.errors import ConfigError
from tiercache.memory.arena import Arena
from tiercache.tiers.files.settings import FileSettings
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.hf3fs.mover import RingMover
from tiercache.tiers.hf3fs.ring import RingSettings

_OPEN_S = 60.0


@dataclass(frozen=True)
class Hf3fsSettings(FileSettings):
    """`cap_bytes` of all base paths together."""

    allowance_bytes: int | None = None
    """Two locked changes of the count for each chunk are as many calls of 3FS as the rest of a write takes."""
    mount: Path | None = None
    """None: the mount that the directories lie on."""
    iov_bytes: int = 200 << 20
    rings: RingSettings = field(default_factory=RingSettings)


class Hf3fsTier(FileTier):
    open_s = _OPEN_S + 10.0
    """Its own deadline comes first, and knows more."""

    def __init__(self, settings: Hf3fsSettings, fingerprint: bytes, *, name: str = "hf3fs") -> None:
        super().__init__(
            name,
            "hf3fs_base_path",
            settings,
            fingerprint,
            lambda shelves: RingMover(shelves, settings.mount, settings.rings, settings.iov_bytes),
        )

    @property
    def mover(self) -> RingMover:
        mover = self.shelves.mover
        assert isinstance(mover, RingMover)
        return mover

    def use_arena(self, arena: Arena) -> None:
        self.mover.arena = arena

    async def open(self) -> None:
        try:
            async with asyncio.timeout(_OPEN_S):
                await super().open()
        except TimeoutError:
            # Any mount of 3FS that hangs on this machine: looking for ours asks all of them.
            raise ConfigError(f"{self.option}: a 3FS mount did not answer for {_OPEN_S:.0f} s") from None
