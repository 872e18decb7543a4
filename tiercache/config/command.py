"""`tiercache config explain`: what a configuration means on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tiercache.config.config import Config
from tiercache.config.explanation import explain
from tiercache.config.loading import read
from tiercache.errors import ConfigError


def explain_command(path: Path | None, as_json: bool) -> int:
    """Print the effective configuration of `path` (or of the file that the environment names) and this environment.

    Returns the exit status: 0, or 1 with the problems on stderr when the configuration cannot be used.
    """
    try:
        explanation = explain(Config(**read(path, os.environ, {})))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(explanation.to_dict(), indent=2))
        return 0
    from rich.console import Console

    from tiercache.config.rendering import render

    render(explanation, Console())
    return 0
