"""Whether GPUDirect Storage works with a directory, found out by doing it in a process of its own.

Where its driver is missing, opening cuFile can spin for ever (kvikio 26.10 without a GPU does), and a killed process is the
only way to end that. Run as `python -m tiercache.tiers.files.gds_probe DIRECTORY ORDINAL`; prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tiercache.device.driver import CudaDriver, Driver
from tiercache.tiers.files.device_files import import_kvikio
from tiercache.tiers.files.mounts import file_system_of

_TIMEOUT_S = 20.0
_BYTES = 1 << 20
_UNFIT = ("tmpfs", "ramfs", "overlay", "fuse")


async def probe_gds(directories: Sequence[Path], driver: Driver, timeout_s: float = _TIMEOUT_S) -> str:
    """Why GPUDirect Storage does not work in one of `directories`; empty when it does in all.

    Cancelled, it ends the process that it started.
    """
    if not driver.name.startswith("cuda"):
        return f"{driver.name} is not a GPU"
    for directory in directories:
        reason = await _ask([sys.executable, "-m", __name__, str(directory), driver.name.partition(":")[2]], timeout_s)
        if reason:
            return f"{directory}: {reason}"
    return ""


async def _ask(command: Sequence[str], timeout_s: float) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate()
    except TimeoutError:
        return f"cuFile's driver did not answer within {timeout_s:.0f} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    for line in reversed(output.decode(errors="replace").splitlines()):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["reason"])
    said = errors.decode(errors="replace").strip().splitlines()[-1:]
    return f"the probe ended with status {process.returncode}: {''.join(said)}"


def try_gds(directory: Path, ordinal: int) -> str:
    """Write and read back 1 MiB of device memory with every fallback of kvikio's switched off; why it did not work."""
    kind = file_system_of(directory)
    if kind.startswith(_UNFIT):
        return f"{kind} cannot do it"
    os.environ["KVIKIO_COMPAT_MODE"] = "OFF"
    path = directory / f".gds-probe.{os.getpid()}"
    try:
        driver = CudaDriver(ordinal)
        kvikio = import_kvikio()
        memory = driver.empty(2 * _BYTES)
        written, read = memory[:_BYTES], memory[_BYTES:]
        stream = driver.make_stream()
        driver.enqueue(stream, lambda: (written.fill_(0xA5), read.zero_()))
        driver.finish(stream)
        with kvikio.CuFile(str(path), "w") as file:
            file.pwrite(written, _BYTES, 0).get()
        with kvikio.CuFile(str(path), "r") as file:
            file.pread(read, _BYTES, 0).get()
        return "" if bool((read.cpu() == 0xA5).all()) else "what was read back is not what was written"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    print(json.dumps({"reason": try_gds(Path(sys.argv[1]), int(sys.argv[2]))}))
