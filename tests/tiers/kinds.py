"""The file tiers by their names, for tests of rules that all of them share."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs_fuse
from tests.remote.fs.test_fs import tier_on
from tests.tiers.opened import open_tier
from tests.tiers.test_contract import LAYOUT
from tests.tiers.test_disk import FILE_BYTES
from tiercache.testing.contract import CHUNK_BYTES
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.gds import GdsSettings, GdsTier
from tiercache.tiers.hf3fs import Hf3fsSettings, Hf3fsTier
from tiercache.tiers.shared_memory import SharedMemorySettings, SharedMemoryTier
from tiercache.tiers.weka import WekaSettings, WekaTier

KINDS = ["disk", "fs", "weka", "gds", "shared_memory"]
HF3FS = pytest.param("hf3fs", marks=needs_fuse)
FEW_BYTES = 12 * (FILE_BYTES + 4096)


def make(kind: str, *places: Path, cap_bytes: int = FEW_BYTES, **settings: Any) -> FileTier:
    fingerprint = LAYOUT.fingerprint
    if kind == "disk":
        return DiskTier(FileSettings(places, cap_bytes, **settings), fingerprint)
    if kind == "weka":
        return WekaTier(WekaSettings(places, cap_bytes, direct=None, threads=2), fingerprint)
    if kind == "gds":
        return GdsTier(GdsSettings(places, cap_bytes, threads=2, way="posix"), fingerprint)
    if kind == "shared_memory":
        return SharedMemoryTier(SharedMemorySettings(places, cap_bytes), fingerprint)
    if kind == "hf3fs":
        rings = Hf3fsSettings(places, cap_bytes, threads=2, chunk_bytes=CHUNK_BYTES, iov_bytes=16 << 20)
        return Hf3fsTier(rings, fingerprint)
    return tier_on(*places, max_size=cap_bytes / 2**30)


def opened(kind: str, *places: Path, cap_bytes: int = FEW_BYTES, **settings: Any) -> AbstractAsyncContextManager[FileTier]:
    return open_tier(make(kind, *places, cap_bytes=cap_bytes, **settings))
