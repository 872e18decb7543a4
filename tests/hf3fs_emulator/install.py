"""Makes `import hf3fs_fuse.io` find the emulator's modules."""

from __future__ import annotations

import sys
from pathlib import Path

SITE = Path(__file__).parent / "site"
"""A directory for PYTHONPATH, with `hf3fs_py_usrbio` and `hf3fs_fuse` in it."""


def install() -> None:
    """Put the emulator's modules first on `sys.path`, in this process. Repeating it does nothing.

    Raises RuntimeError when other modules of these names were imported before.
    """
    for name in ("hf3fs_py_usrbio", "hf3fs_fuse"):
        imported = sys.modules.get(name)
        if imported is not None and not str(imported.__file__).startswith(str(SITE)):
            raise RuntimeError(f"{name} is imported already, from {imported.__file__}")
    if str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
