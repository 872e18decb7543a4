"""The two things in which file tiers differ. Each is chosen once, when a tier is made, and belongs to the event loop."""

from __future__ import annotations

import asyncio
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from tiercache.core.index import CappedIndex
from tiercache.core.keys import ChunkKey
from tiercache.device.driver import Tensor
from tiercache.errors import DeviceError
from tiercache.tiers.files.changes import Victims
from tiercache.tiers.files.scanning import Shelf
from tiercache.tiers.files.volume import Volume


class Mover(ABC):
    """Who moves bytes between memory and files. What a call promises is what `Volume.read` and `Volume.write` promise; what
    has been begun goes on when its future is cancelled."""

    places: int
    """How many reads it takes on at a time. Known once it is open."""
    sees_remounts = False
    """Whether it finds out itself that another mount is in the place of its own, and calls `Shelves.remount`."""
    perhaps_files = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO})
    """Errors of a read that are the file's fault, or the device's."""

    async def prepare(self) -> None:  # noqa: B027 - most have nothing to do then
        """Before the directories are opened. Raises ConfigError."""

    async def open(self) -> None:  # noqa: B027
        """The directories are open. Raises ConfigError."""

    @abstractmethod
    async def close(self) -> None:
        """Idempotent; does not wait for what hangs."""

    @property
    def write_places(self) -> int:
        """How many writes it takes on at a time."""
        return self.places

    @property
    def serves_device(self) -> bool:
        """Whether it moves device memory. Known once it is open."""
        return False

    @property
    def keeps_files_open(self) -> bool:
        """A deleted file takes its space until it is closed."""
        return False

    def describe(self) -> str:
        """A phrase for a log line, or nothing."""
        return ""

    @abstractmethod
    def read(self, volume: Volume, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        """As `Volume.read`."""

    @property
    def prefetches_apart(self) -> bool:
        """As `Traits.prefetches_apart`."""
        return False

    def prefetch(self, volume: Volume, key: ChunkKey, into: np.ndarray) -> asyncio.Future[int | None]:
        """As `read`; it may stand still while there are reads."""
        return self.read(volume, key, into)

    def hurry(self, key: ChunkKey) -> None:  # noqa: B027
        """As `Tier.hurry`."""

    @abstractmethod
    def write(
        self, volume: Volume, key: ChunkKey, payload: np.ndarray, payload_bytes: int, victims: Victims
    ) -> asyncio.Future[int]:
        """As `Volume.write`."""

    def read_device(self, volume: Volume, key: ChunkKey, into: Tensor) -> asyncio.Future[int | None]:
        """As `Volume.read`, into device memory."""
        raise DeviceError("there is no device; only host memory is served")

    def write_device(
        self, volume: Volume, key: ChunkKey, payload: Tensor, payload_bytes: int, victims: Victims
    ) -> asyncio.Future[int]:
        """As `Volume.write`, from device memory."""
        raise DeviceError("there is no device; only host memory is served")

    def forget(self, path: str) -> None:  # noqa: B027
        """The file at `path` is gone, or is being deleted: close it. Blocks; in a worker thread."""

    def deleted(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027
        """Chunks are being deleted, or were, by any process: close their files soon."""

    async def close_deleted(self) -> int:
        """Close the files that other processes have deleted. Return how many there were."""
        return 0

    def failed(self, error: OSError) -> None:  # noqa: B027
        """A call failed, perhaps because the mount is dead."""

    def suspect(self) -> None:  # noqa: B027
        """A directory is not what it was."""


class Knowledge(ABC):
    """What is known of a directory."""

    @abstractmethod
    def make_index(self) -> CappedIndex:
        """An empty one."""

    def begin(self, shelf: Shelf) -> None:  # noqa: B027 - only shared directories need it
        """Keep the index of a shelf fresh from now on."""

    @abstractmethod
    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        """As `Tier.probe`."""

    @abstractmethod
    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """As `Tier.probe_each`."""

    def missed(self, shelf: Shelf) -> None:  # noqa: B027
        """Somebody read a chunk that is in no index."""

    def follow_deletions(  # noqa: B027 - what follows everything needs nothing for it
        self, shelf: Shelf, on_stored: Callable[[ChunkKey], None] | None = None
    ) -> None:
        """What others delete is to leave the index soon, and not when somebody asks for it. `on_stored` is called with the
        chunks that somebody stores, here or elsewhere on this host, as far as the kernel tells."""

    async def refreshed(self) -> None:  # noqa: B027
        """Wait until the index has what others did before this call, where it follows them."""

    def close(self) -> None:  # noqa: B027
        """Let threads end. What was begun is called off by then."""
