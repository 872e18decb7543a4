"""Loading configurations without this process's environment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiercache.config import Config
from tiercache.errors import ConfigError


@pytest.fixture
def load_text(tmp_path: Path) -> Callable[..., Config]:
    """Load a YAML text, with an environment and overrides."""

    def load(text: str | bytes, environ: dict[str, str] | None = None, overrides: dict[str, Any] | None = None) -> Config:
        path = tmp_path / "tiercache.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return Config.load(path, environ=environ or {}, overrides=overrides)

    return load


@pytest.fixture
def problem_of(load_text: Callable[..., Config]) -> Callable[..., str]:
    """The message of the ConfigError that a YAML text causes."""

    def problem(text: str | bytes = "", **rest: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            load_text(text, **rest)
        return str(caught.value)

    return problem
