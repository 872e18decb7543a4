"""Explain in an ImportError that an engine is missing or unsupported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(who: str, needs: str, install: str) -> Iterator[None]:
    """Wrap imports. Raises ImportError in one sentence: what `who` needs, why the import fails, what to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{who} needs {needs}, which cannot be imported ({error}): pip install {install}") from error
