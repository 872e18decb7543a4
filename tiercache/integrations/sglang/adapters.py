"""What the LoRA adapters hold that SGLang loads at start.

SGLang names the pages of such an adapter by its name and path, and means its content, which may be another one at the next
start. An adapter that is loaded later, or loaded again, gets a random name: its pages are this engine's alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiercache.integrations.vllm.identity import adapter_files, identity_of_adapter

logger = logging.getLogger("tiercache.sglang")

_GRAIN_NS = 2_000_000_000
"""By so much clocks of file systems may be wrong."""


def identity_of_adapters(lora_paths: Any, place_of: Callable[[str], Path | None], since_ns: int) -> str:
    """What of `lora_paths`, SGLang's argument, names pages: names and paths as they are, with the content of the adapters.

    `place_of` finds the directory of a path. The engine loaded what lies there after `since_ns`. Where it cannot be known
    what that was, nothing is equal to what this returns: nothing is shared then, also not with the next start or with
    other ranks.
    """
    try:
        known = sorted((name, path, _content(path, place_of, since_ns)) for name, path in _named(lora_paths))
    except (OSError, TypeError, ValueError) as error:
        logger.warning("nothing is shared with other processes, also not with the next start: %s", error)
        return f"unknown, of {os.urandom(16).hex()}"
    return repr(known) if known else ""


def began_ns() -> int:
    """When this process began, on the clock that files have."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    ago_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(ago_s * 1e9)


def _named(lora_paths: Any) -> Sequence[tuple[str, str]]:
    """Name and path of each, in all the forms that SGLang takes. Raises TypeError for another."""
    if isinstance(lora_paths, dict):
        return [(str(name), str(path)) for name, path in lora_paths.items()]
    found = []
    for one in lora_paths or ():
        if isinstance(one, str):
            name, equals, path = one.partition("=")
            found.append((name, path if equals else name))
        elif isinstance(one, dict):
            found.append((str(one["lora_name"]), str(one["lora_path"])))
        elif isinstance(getattr(one, "lora_path", None), str):
            found.append((str(one.lora_name), one.lora_path))
        else:
            raise TypeError(f"lora_paths: expected names and paths, found {type(one).__name__}")
    return found


def _content(path: str, place_of: Callable[[str], Path | None], since_ns: int) -> str:
    place = place_of(path)
    if place is None:
        raise ValueError(f"the LoRA adapter {path} is not files here")
    for name, file in adapter_files(place).items():
        stat = file.stat()
        if max(stat.st_mtime_ns, stat.st_ctime_ns) > since_ns - _GRAIN_NS:
            raise ValueError(f"{name} of the LoRA adapter {path} was changed after the engine began")
    return identity_of_adapter(place)
