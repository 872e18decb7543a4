"""A checked configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercache.config.loading import check_fields, load, read
from tiercache.config.schema import ConfigFields


@dataclass(frozen=True, repr=False)
class Config(ConfigFields):
    """A checked configuration. `Config.load` reads one; built directly, values are checked as well.

    Raises ConfigError that names every problem it found.
    """

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> Config:
        """Read the YAML file, then the environment, then `overrides`; later ones win.

        Without `path` the file is the one that TIERCACHE_CONFIG_FILE or LMCACHE_CONFIG_FILE names, if any. In the
        environment (`os.environ` by default) TIERCACHE_* wins over LMCACHE_*. Keys of `overrides` may be prefixed with
        `tiercache.` or `lmcache.`. Logs each of `warnings`, but for `quiet`. Raises ConfigError that names every problem.
        """
        reading = read if quiet else load
        return cls(**reading(path, os.environ if environ is None else environ, overrides or {}))

    def __post_init__(self) -> None:
        check_fields(self)
