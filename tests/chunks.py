"""Where a file tier stores chunks."""

from pathlib import Path


def chunks_of(directory: Path) -> Path:
    """Return the directory of the chunks of a configured directory."""
    return directory / "tiercache-chunks"
