"""The GDS tier: the disk tier, which also reads and writes device memory.

`DeviceIO` moves device memory through pinned host memory (`DeviceFiles`) or cuFile (`KvikioFiles`), which are synchronous
and run in worker threads. The host computes the checksum over a pinned copy in both cases, so that every tier and
`tiercache verify` can read every file.

`probe_gds` tries GPUDirect Storage in a separate process, since opening cuFile without its driver can hang forever. `python
-m tiercache.tiers.gds DIRECTORY ORDINAL` prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from tiercache.core.compression import Codec
from tiercache.core.header import HEADER_BYTES, PACKED_BYTES, Header, aligned, file_bytes, payload_checksum
from tiercache.core.keys import ChunkKey
from tiercache.device.device import Device
from tiercache.device.driver import CudaDriver, Driver, Stream, Tensor, host_tensor
from tiercache.errors import ConfigError, CorruptChunk, DeviceError, TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.slots import zero_padding
from tiercache.memory.workers import wait_shielded
from tiercache.tiers.compression import unpacked
from tiercache.tiers.files.access import file_system_of, occupied_bytes
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import Directories, FileSettings
from tiercache.tiers.files.format import (
    NO_ROOM,
    created,
    host_checksum,
    read_chunk_file,
    verify_chunk,
    write_chunk_file,
)
from tiercache.tiers.files.io_posix import PosixIO
from tiercache.tiers.files.tier import FileTier

logger = logging.getLogger("tiercache.disk")

_TASK_BYTES = 16 << 20


class _Buffer(NamedTuple):
    """Pinned memory of one call, and the stream of its copies."""

    memory: np.ndarray
    stream: Stream


class DeviceFiles:
    """Moves chunks through pinned buffers with the disk tier's reads and writes.

    `threads` limits concurrent calls; each has a buffer. `write_chunk_file` defines `direct` and `durable`. After close,
    `read` and `write` raise TierUnavailable.
    """

    name = "posix"

    def __init__(self, driver: Driver, chunk_bytes: int, threads: int) -> None:
        self._driver = driver
        self._buffer_bytes = file_bytes(chunk_bytes)
        self._threads = threads
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        self._arena: Arena | None = None
        self._pinned = False
        self._lock = threading.Lock()
        self._calls = 0
        """Reads and writes in flight. The last one frees what `close` could not."""
        self._closed = False

    def open(self) -> None:
        """Allocate the buffers. Raises DeviceError, OSError or ImportError with the reason if this is not possible."""
        self._closed = False
        self._arena = Arena(ArenaSettings(size_bytes=self._threads * self._buffer_bytes))
        self._pinned = self._driver.pin(self._arena.memory, self._buffer_bytes)
        for number in range(self._threads):
            start = number * self._buffer_bytes
            memory = self._arena.memory[start : start + self._buffer_bytes]
            self._buffers.put(_Buffer(memory, self._driver.make_stream()))

    def read(self, path: str, key: bytes, fingerprint: bytes, into: Tensor, *, direct: bool) -> int:
        """Read the chunk at `path` into device memory, verify and decompress it. Return the payload's length."""
        with self._buffer() as buffer:
            return self._load(path, key, fingerprint, into, buffer, direct=direct)

    def write(
        self, path: str, key: bytes, fingerprint: bytes, payload: Tensor, payload_bytes: int, *, direct: bool, durable: bool
    ) -> int:
        """Write a chunk from device memory like `write_chunk_file`."""
        with self._buffer() as buffer:
            padded = buffer.memory[HEADER_BYTES : file_bytes(payload_bytes)]
            self._copy(host_tensor(padded[:payload_bytes]), payload[:payload_bytes], buffer.stream)
            padded[payload_bytes:] = 0
            header = Header(key, fingerprint, payload_bytes, payload_checksum(padded[:payload_bytes]))
            return self._store(path, header, payload, buffer, direct=direct, durable=durable)

    def close(self) -> None:
        """Close. Idempotent. The last call in flight frees what it uses."""
        with self._lock:
            self._closed = True
            self._free_if_unused()

    def _load(self, path: str, key: bytes, fingerprint: bytes, into: Tensor, buffer: _Buffer, *, direct: bool) -> int:
        padded = buffer.memory[HEADER_BYTES:]
        length = unpacked(read_chunk_file(path, key, fingerprint, padded, direct=direct), padded)
        self._upload(into, padded, length, buffer.stream)
        return length

    def _store(self, path: str, header: Header, payload: Tensor, buffer: _Buffer, *, direct: bool, durable: bool) -> int:
        """Write the file. `buffer` holds the payload behind the header's page."""
        return write_chunk_file(path, header, buffer.memory[HEADER_BYTES:], direct=direct, durable=durable)

    def _upload(self, into: Tensor, padded: np.ndarray, length: int, stream: Stream) -> None:
        zero_padding(padded, length)
        self._copy(into[: aligned(length)], host_tensor(padded[: aligned(length)]), stream)

    def _copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Copy, and wait for the end, even if the copy fails after a part of it has begun."""
        try:
            self._driver.copy(destination, source, stream)
        finally:
            self._driver.finish(stream)

    def _free_if_unused(self) -> None:
        if self._closed and not self._calls:
            self._free()

    def _free(self) -> None:
        """Free everything. Idempotent."""
        arena, self._arena = self._arena, None
        if arena is None:
            return
        if self._pinned:
            self._driver.unpin(arena.memory)
        while not self._buffers.empty():
            self._buffers.get_nowait()
        arena.close()

    @contextmanager
    def _buffer(self) -> Iterator[_Buffer]:
        """Hold a buffer during a call."""
        with self._lock:
            if self._closed:
                raise TierUnavailable(f"{self.name}: the files are closed")
            self._calls += 1
        buffer = self._buffers.get_nowait()
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)
            del buffer
            with self._lock:
                self._calls -= 1
                self._free_if_unused()


class KvikioFiles(DeviceFiles):
    """Moves device memory directly to and from files by GPUDirect Storage. `memory` is the pool, registered with cuFile.
    Each payload in it follows a page for the header, so that a file is one transfer.
    """

    name = "cufile"

    def __init__(self, driver: Driver, memory: Tensor, chunk_bytes: int, threads: int) -> None:
        super().__init__(driver, chunk_bytes, threads)
        self._memory = memory
        self._kvikio: Any = None
        self._registered = False

    def open(self) -> None:
        super().open()
        self._kvikio = import_kvikio()
        self._kvikio.defaults.set({"num_threads": self._threads, "task_size": _TASK_BYTES})
        if self._memory.device.type != "cpu":
            self._kvikio.memory_register(self._memory)
            self._registered = True

    def _free(self) -> None:
        if self._registered:
            self._kvikio.memory_deregister(self._memory)
            self._registered = False
        super()._free()

    def _load(self, path: str, key: bytes, fingerprint: bytes, into: Tensor, buffer: _Buffer, *, direct: bool) -> int:
        total_bytes = os.stat(path).st_size
        room_bytes = HEADER_BYTES + into.numel()
        if total_bytes < file_bytes(1) or total_bytes > room_bytes:
            raise CorruptChunk(f"{path}: length: expected at most {room_bytes} bytes, found {total_bytes}")
        got = self._transfer(path, "r", _slot(into, total_bytes))
        self._copy(host_tensor(buffer.memory[:total_bytes]), _slot(into, total_bytes), buffer.stream)
        padded, raw_header = buffer.memory[HEADER_BYTES:], buffer.memory[:PACKED_BYTES].data
        header = verify_chunk(path, raw_header, key, fingerprint, got, total_bytes, host_checksum(padded))
        length = unpacked(header, padded)
        if header.codec is not Codec.PLAIN:
            self._upload(into, padded, length, buffer.stream)
        return length

    def _store(self, path: str, header: Header, payload: Tensor, buffer: _Buffer, *, direct: bool, durable: bool) -> int:
        total_bytes = file_bytes(header.payload_bytes)
        page = buffer.memory[:HEADER_BYTES]
        page[:] = 0
        page[:PACKED_BYTES] = np.frombuffer(header.pack(), dtype=np.uint8)
        slot = _slot(payload, total_bytes)
        self._copy(slot[:HEADER_BYTES], host_tensor(page), buffer.stream)
        with created(path, os.O_RDWR, total_bytes) as descriptor:
            written = self._transfer(path, "r+", slot)
            if written != total_bytes:
                raise OSError(errno.EIO, f"short write: {written} of {total_bytes} bytes", path)
            if durable:
                os.fdatasync(descriptor)
            return occupied_bytes(os.fstat(descriptor))

    def _transfer(self, path: str, flags: str, slot: Tensor) -> int:
        """Move a whole slot from or to a file. Return the bytes moved. kvikio raises RuntimeError for all errors."""
        memory = slot if slot.device.type != "cpu" else slot.numpy()
        try:
            with closing(self._kvikio.CuFile(path, flags)) as file:
                move = file.pread if flags == "r" else file.pwrite
                return int(move(memory, slot.numel(), 0, _TASK_BYTES).get())
        except RuntimeError as error:
            if not os.path.exists(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            text = str(error)
            code = next(
                (code for code in NO_ROOM if os.strerror(code) in text or errno.errorcode[code] in text), errno.EIO
            )
            raise OSError(code, f"cuFile: {text}", path) from error


def _slot(payload: Tensor, total_bytes: int) -> Tensor:
    """Return a payload's slot, which begins with the header's page."""
    return payload.as_strided((total_bytes,), (1,), payload.storage_offset() - HEADER_BYTES)


def import_kvikio() -> Any:
    """Return kvikio, whose libraries need `rapids_logger`. Raises ImportError that says what is missing."""
    try:
        import rapids_logger

        rapids_logger.load_library()
        import kvikio
        import kvikio.defaults
    except Exception as error:  # kvikio's loaders raise their own classes
        raise ImportError(f"kvikio cannot be loaded ({error}): pip install 'tiercache[gds]'") from error
    return kvikio


_TIMEOUT_S = 20.0
_BYTES = 1 << 20
_UNFIT = ("tmpfs", "ramfs", "overlay", "fuse")


async def probe_gds(directories: Sequence[Path], driver: Driver, timeout_s: float = _TIMEOUT_S) -> str:
    """Return why GPUDirect Storage does not work in one of `directories`, or an empty string.

    Cancellation ends the probe's process.
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
    """Write and read 1 MiB of device memory without kvikio's fallbacks. Return why it failed, or an empty string."""
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


class DeviceIO(PosixIO):
    """Also moves device memory, through cuFile if GPUDirect Storage works, else through pinned host memory. `open` decides.
    Without a device it serves host memory only.
    """

    def __init__(self, directories: Directories, device: Device | None, way: str) -> None:
        """`way`: auto (cuFile if it works), cufile (or ConfigError), posix (pinned memory)."""
        super().__init__(directories)
        self.device = device
        self.files: DeviceFiles | None = None
        self._way = way

    @property
    def serves_device(self) -> bool:
        return self.files is not None

    async def open(self) -> None:
        directories = self._directories
        if self.device is None:
            logger.warning(
                "%s: no GPU is in use here: chunks go through host memory, like the disk tier's", directories.option
            )
            return
        driver, pool = self.device.driver, self.device.pool
        paths, chunk_bytes = directories.settings.directories, directories.settings.chunk_bytes
        threads = 2 * directories.settings.threads
        if self._way != "posix":
            reason = await probe_gds(paths, driver)
            if not reason:
                try:
                    await self._take(KvikioFiles(driver, pool.memory, chunk_bytes, threads))
                    return
                except (DeviceError, OSError, ImportError, RuntimeError) as error:
                    reason = str(error)
            if self._way == "cufile":
                raise ConfigError(
                    f"{directories.option}: GPUDirect Storage does not work with {', '.join(map(str, paths))}: {reason}. "
                    "Set use_gds: false to go through pinned host memory instead"
                )
            logger.warning(
                "%s: no GPUDirect Storage (%s): going through pinned host memory", directories.option, reason
            )
        await self._take(DeviceFiles(driver, chunk_bytes, threads))

    async def close(self) -> None:
        files, self.files = self.files, None
        if files is not None:
            self._directories.metadata.later(files.close)
        await super().close()

    def describe(self) -> str:
        return self.files.name if self.files is not None else "host memory only"

    def read_device(self, files: ChunkFiles, key: ChunkKey, into: Tensor) -> asyncio.Future[int | None]:
        device_files, fingerprint = self._device_files(), self._directories.fingerprint

        def read() -> int | None:
            return files.read_by(key, lambda path: device_files.read(path, key, fingerprint, into, direct=files.direct))

        return self._readers.submit(read)

    def write_device(
        self, files: ChunkFiles, key: ChunkKey, payload: Tensor, payload_bytes: int
    ) -> asyncio.Future[int]:
        device_files, fingerprint = self._device_files(), self._directories.fingerprint

        def create(path: str) -> int:
            return device_files.write(
                path, key, fingerprint, payload, payload_bytes, direct=files.direct, durable=files.durable
            )

        return self._writers.submit(files.write_by, key, payload_bytes, create)

    def _device_files(self) -> DeviceFiles:
        if self.files is None:
            raise DeviceError(f"{self._directories.name}: there is no device; only host memory is served")
        return self.files

    async def _take(self, files: DeviceFiles) -> None:
        """Open `files` and use them. Closes them on failure or cancellation."""
        try:
            await wait_shielded(self._directories.metadata.submit(files.open))
        except BaseException:
            self._directories.metadata.later(files.close)
            raise
        self.files = files


@dataclass(frozen=True)
class GdsSettings(FileSettings):
    """Settings of the GDS tier. `chunk_bytes` is required with a device."""

    way: str = "auto"
    """auto: cuFile if it works, else posix. cufile: cuFile or ConfigError. posix: through pinned host memory."""


class GdsTier(FileTier):
    def __init__(self, settings: GdsSettings, fingerprint: bytes, device: Device | None = None) -> None:
        super().__init__(
            "gds",
            "gds_path",
            settings,
            fingerprint,
            lambda directories: DeviceIO(directories, device, settings.way),
        )


if __name__ == "__main__":
    print(json.dumps({"reason": try_gds(Path(sys.argv[1]), int(sys.argv[2]))}))
