"""`tiercache config explain`: what a configuration means on this machine."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from tiercache.assembly import refused_remotes
from tiercache.config.config import Config
from tiercache.config.explanation import explain
from tiercache.config.loading import read
from tiercache.config.plan import REFUSED
from tiercache.errors import ConfigError


def explain_command(path: Path | None, as_json: bool, defaults: bool = False) -> int:
    """Print the effective configuration of `path` (or of the file that the environment names) and this environment.

    Returns the exit status: 0, or 1 with the problems on stderr when the configuration cannot be used here.
    """
    try:
        config = Config(**read(path, os.environ, {}))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    refused = {planned.name: str(error) for planned, error in refused_remotes(config)}
    explanation = explain(config)
    tiers = [
        replace(tier, state=REFUSED, note=refused[tier.name]) if tier.name in refused else tier
        for tier in explanation.tiers
    ]
    explanation = replace(explanation, tiers=tuple(tiers))
    if as_json:
        print(json.dumps(explanation.to_dict(), indent=2))
    else:
        from rich.console import Console

        from tiercache.config.rendering import render

        render(explanation, Console(), defaults=defaults)
    for problem in refused.values():
        print(f"error: {problem}", file=sys.stderr)
    return 1 if refused else 0
