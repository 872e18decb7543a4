"""A directory on the machine's own disk, as the disk tier has it, or as the fs tier does."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.chunks import chunks_of
from tests.torture.campaign.payloads import CHUNK_BYTES, KEYS_A_SLOT, SLOTS, TOP_DIRECTORIES
from tests.torture.campaign.places.base import Occupied, Place
from tiercache.core.header import HEADER_BYTES, PACKED_BYTES, Header, file_bytes
from tiercache.core.keys import ChunkKey

FILE_BYTES = file_bytes(CHUNK_BYTES)
_BLOCK_BYTES = 4096
CROWDED_CAP_BYTES = TOP_DIRECTORIES * _BLOCK_BYTES + 80 * FILE_BYTES
ROOMY_CAP_BYTES = TOP_DIRECTORIES * _BLOCK_BYTES + 5 * SLOTS * KEYS_A_SLOT * FILE_BYTES // 2
_PENDING = re.compile(r"[0-9a-f]{32}\.\d+")
_FS_STALE_S = 15.0
_COMPRESSIONS = ("none", "zstd", "lz4")
"""Writers differ, and each reads what the others stored."""


class DirectoryPlace(Place):
    def __init__(self, name: str, directory: Path, kind: str, cap_bytes: int, *, keeps: bool) -> None:
        super().__init__(name, directory)
        self.kind = kind
        self.cap_bytes: int = cap_bytes
        self.keeps = keeps
        if kind == "fs":
            self.stale_s = _FS_STALE_S

    def open(self) -> None:
        self.chunks.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Its files stay as they are."""

    @property
    def chunks(self) -> Path:
        return self.directory / "chunks"

    def overrides(self, slot: int) -> dict[str, Any]:
        shared_memory = {"shm_name": f"{self.directory.parent.name}-{self.name}-{slot}"} if slot % 2 else {}
        cap_gb = self.cap_bytes / 2**30
        if self.kind == "fs":
            remote = "remote_storage_plugin.fs"
            options = {f"{remote}.base_path": str(self.chunks), f"{remote}.max_size": cap_gb, f"{remote}.threads": 4}
            options[f"{remote}.compression"] = _COMPRESSIONS[slot % len(_COMPRESSIONS)]
            return self.config(remote_storage_plugins=["fs"], **options, **shared_memory)
        # Half of the writers make every chunk durable.
        durability = "fdatasync" if slot < 2 else "none"
        return self.config(
            local_disk=str(self.chunks),
            max_local_disk_size=cap_gb,
            disk_durability=durability,
            disk_compression=_COMPRESSIONS[slot % len(_COMPRESSIONS)],
            **shared_memory,
        )

    def damage(self, keys: Sequence[ChunkKey], random: Random) -> ChunkKey | None:
        files = {key: chunks_of(self.chunks) / key.hex()[:2] / key.hex() for key in keys}
        there = [key for key, file in files.items() if file.exists()]
        if not there:
            return None
        key = random.choice(there)
        with files[key].open("r+b") as file:
            header = Header.unpack(file.read(PACKED_BYTES))
            in_header = random.random() < 0.2
            at = random.randrange(PACKED_BYTES) if in_header else HEADER_BYTES + random.randrange(header.payload_bytes)
            file.seek(at)
            flipped = file.read(1)[0] ^ 1 << random.randrange(8)
            file.seek(at)
            file.write(bytes([flipped]))
        return key

    def occupied(self) -> Occupied:
        return occupied(chunks_of(self.chunks))


def occupied(root: Path) -> Occupied:
    """What lies below `root` at this instant, each file once however many names it has."""
    counted_bytes = private_bytes = 0
    seen: set[int] = set()
    for place, directories, files in os.walk(root):
        relative = os.path.relpath(place, root)
        for name in (*directories, *files):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(place, name))
                if status.st_ino in seen:
                    continue
                seen.add(status.st_ino)
                is_private = relative.startswith(".tiercache") or (relative == "." and len(name) != 2)
                if is_private and not _PENDING.fullmatch(name):
                    private_bytes += status.st_blocks * 512
                else:
                    counted_bytes += status.st_blocks * 512
    return Occupied(counted_bytes, private_bytes)
