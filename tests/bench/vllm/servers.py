"""The servers that are compared: the same but for what is compared, with the same threads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.vllm.steps import STEPS_FILE
from tests.bench.vllm.workload import BLOCK_TOKENS, CLIENTS, ENGINE_BLOCKS, LONGEST_TOKENS
from tiercache.demo.server import Server, serving

CONFIG = """\
chunk_size: {block_tokens}
max_local_cpu_size: {hot_gb}
local_disk: "{directory}"
max_local_disk_size: 3.0
"""
OURS, ALONE, CEILING, FEW = "vllm", "alone.vllm", "ceiling.vllm", "few.vllm"
"""How figures begin: with tiercache, without a connector, that with an engine cache that holds everything, and that with as
few requests at a time as the small engine cache has room for."""
_TIMED = "tests.bench.vllm.timed:TimedConnector"
_IDLE_PART = 0.05
"""Of a core: a server that takes less does nothing."""
_LOOK_S = 0.25
_SETTLE_S = 60.0


@dataclass(frozen=True)
class Side:
    """A server, and how the names of its figures begin."""

    name: str
    server: Server

    def cpu_s(self) -> float:
        """What all processes of the server have used so far, seconds of a core."""
        found = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # gone meanwhile
            if int(fields[2]) == self.server.group:
                found += int(fields[11]) + int(fields[12])
        return found / os.sysconf("SC_CLK_TCK")

    async def settle(self) -> None:
        """Wait until the server does nothing any more: what was queued is written, what was given up has ended."""
        until_s = time.monotonic() + _SETTLE_S
        while await self.busy_part() > _IDLE_PART and time.monotonic() < until_s:
            pass

    async def busy_part(self, look_s: float = _LOOK_S) -> float:
        """Of a core, over so many seconds."""
        before, began_s = self.cpu_s(), time.monotonic()
        await asyncio.sleep(look_s)
        return (self.cpu_s() - before) / (time.monotonic() - began_s)


@contextmanager
def side(
    name: str,
    model: Path,
    place: Path,
    blocks: int = ENGINE_BLOCKS,
    hot_gb: float = 0.0,
    disk: Path | None = None,
    requests: int = CLIENTS,
) -> Iterator[Side]:
    """A server whose engine cache has so many blocks and which runs so many `requests` at a time, with tiercache where
    there is a `disk`. Raises `ServerFailed`.

    Its log, and what the connector says of its steps, lie in `place`.
    """
    place.mkdir(parents=True)
    config = None
    if disk is not None:
        config = place / "tiercache.yaml"
        config.write_text(CONFIG.format(block_tokens=BLOCK_TOKENS, hot_gb=hot_gb, directory=disk))
    arguments = [
        *("--max-model-len", str(LONGEST_TOKENS), "--max-num-seqs", str(requests)),
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks)),
    ]
    environment = {
        # As "auto", vLLM keeps a core of its own beside a connector, and another one without.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:2])),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        STEPS_FILE: str(steps_file(place)),
    }
    with serving(
        model, place / "server.log", config, connector=_TIMED, arguments=arguments, environment=environment
    ) as server:
        yield Side(name, server)


def steps_file(place: Path) -> Path:
    return place / "steps"
