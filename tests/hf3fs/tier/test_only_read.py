"""`role: read` of the 3FS tier, on the emulator."""

from pathlib import Path
from typing import Any

import pytest

from tests.test_cache import CHUNK_BYTES
from tests.tiers.test_only_read import ReaderContract
from tiercache.core.header import file_bytes


def hf3fs(directory: Path, role: str, chunks: int) -> dict[str, Any]:
    prefix = "remote_storage_plugin.hf3fs.a."
    size_gb = chunks * file_bytes(CHUNK_BYTES) / 2**30
    options = {f"{prefix}base_path": str(directory), f"{prefix}role": role}
    return {"remote_storage_plugins": ["hf3fs.a"], "extra_config": options, "max_hf3fs_size": size_gb}


class TestHf3fs(ReaderContract):
    configured = staticmethod(hf3fs)

    @pytest.fixture
    def directory(self, place: Path) -> Path:
        return place
