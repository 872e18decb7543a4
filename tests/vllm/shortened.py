"""The first layers of the demo's model: real weights and a real vLLM, whose answers a CPU computes four times sooner."""

from __future__ import annotations

import json
import re
from pathlib import Path

LAYERS = 6
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def shorten(model: Path, directory: Path) -> Path:
    """Make `directory` hold the first layers of `model`; returns it."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    directory.mkdir()
    with safe_open(model / _WEIGHTS, "pt") as weights:
        kept = {name: weights.get_tensor(name) for name in weights.keys() if _layer(name) < LAYERS}  # noqa: SIM118
    save_file(kept, directory / _WEIGHTS, metadata={"format": "pt"})
    config = json.loads((model / _CONFIG).read_text())
    (directory / _CONFIG).write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    for path in model.iterdir():
        if path.name not in (_CONFIG, _WEIGHTS):
            (directory / path.name).symlink_to(path)
    return directory


def _layer(name: str) -> int:
    """-1: what lies outside of the layers."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1
