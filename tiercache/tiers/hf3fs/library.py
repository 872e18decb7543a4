"""3FS's own Python modules, found when the tier opens: importing tiercache needs none of them."""

from __future__ import annotations

from types import ModuleType

from tiercache.errors import ConfigError


def load_library() -> ModuleType:
    """`hf3fs_fuse.io`. Raises ConfigError with what is missing."""
    try:
        import hf3fs_fuse.io
    except ImportError as error:
        raise ConfigError(
            f"the 3FS tier needs hf3fs_py_usrbio and hf3fs_fuse, which cannot be imported ({error}): build them from "
            "the 3FS sources"
        ) from error
    module: ModuleType = hf3fs_fuse.io
    return module
