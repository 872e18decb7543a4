"""Fixtures that several parts share."""

import pytest

from tiercache.core.layout import Layout


@pytest.fixture
def layout() -> Layout:
    """Chunks of 64 tokens and 64 KiB."""
    return Layout("test-model", chunk_tokens=64, bytes_per_token=1024)
