"""What an integration says where its engine is not installed, or is one that it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(who: str, needs: str, install: str) -> Iterator[None]:
    """For imports. ImportError is raised again as one sentence: what `who` needs, why that fails, what to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{who} needs {needs}, which cannot be imported ({error}): pip install {install}") from error
