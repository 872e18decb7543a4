"""The identity of a model's weights, or of a LoRA adapter, from the content of its files.

Two directories have the same identity if the files that determine the KV have the same names and bytes: all weights, the
indices that map tensors to files, and the files that tell how weights and images are read. Names of commits, times, paths,
tokenizers and licences do not count. `config.json` does not count either: engines change it, so it is theirs to compare.

*Digests* (`digests_of`) are kept beside the files, or in the user's cache if that directory is not writable. A kept digest
is valid for a file with the same size, modification time, change time and inode. The kernel sets the change time whenever a
file is written, and no program can set it back. A file that was changed within the resolution of the file system's clock
before it was read is not kept. Files of the Hugging Face cache are named by their SHA-256 and are not read. Of several
processes that begin together one reads, and the others find what it has kept.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from tiercache.errors import TierUnavailable
from tiercache.tiers.files.access import lock_within

logger = logging.getLogger("tiercache")

KEPT = ".tiercache-digests.json"
GRAIN_NS = 2_000_000_000
"""Coarsest resolution of a file system's clock that is still in use: two seconds."""
_PART_BYTES = 1 << 20
_MOST_THREADS = 16
_STALL_S = 30.0
"""Seconds without a byte after which the files' mount is assumed to hang."""
_OTHER_READER_S = 600.0
"""Longest wait for another process that reads the same files. After that this process reads them too."""
_SHA256 = re.compile(r"[0-9a-f]{64}")

Stamp = tuple[int, int, int, int]
"""Size in bytes, modification and change time in ns, inode."""


class _Digest(NamedTuple):
    sha256: str
    stamp: Stamp
    settled: bool = True
    """True if every later change of the file changes the stamp."""


def digests_of(files: Mapping[str, Path], directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each of `files`, as hex. Reads the files without a kept digest, once, in threads.

    `files` lie below `directory`, and digests are kept by their names in the mapping. Raises OSError if a file cannot
    be read or is written to meanwhile, and TimeoutError if no bytes arrive for 30 s.
    """
    found = {name: sha256 for name, path in files.items() if (sha256 := _name_of_blob(path)) is not None}
    if len(found) == len(files):
        return found
    with _one_reader(directory):
        kept = _kept(directory)
        for name in files.keys() - found.keys():
            if name in kept and kept[name].stamp == stamp_of(files[name].stat()):
                found[name] = kept[name].sha256
        if left := files.keys() - found.keys():
            read = _read_all({name: files[name] for name in left})
            found |= {name: digest.sha256 for name, digest in read.items()}
            _keep(directory, {name: digest for name, digest in read.items() if digest.settled})
    return found


@contextlib.contextmanager
def _one_reader(directory: Path) -> Iterator[None]:
    """Let the processes of this host in one after another. They all enter at once if the file system has no such locks."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, TierUnavailable):
            descriptor = os.open(directory, os.O_RDONLY)
            held.callback(os.close, descriptor)
            lock_within(descriptor, _OTHER_READER_S, directory)
        yield


def _read_all(files: Mapping[str, Path]) -> dict[str, _Digest]:
    """Read files in daemon threads, since a mount that hangs must not block the engine's exit."""
    began_s = time.monotonic()
    left = deque(files.items())
    news: SimpleQueue[tuple[str, _Digest | OSError] | None] = SimpleQueue()
    """The outcome of each file, and None for each part that was read."""

    def read() -> None:
        with contextlib.suppress(IndexError):
            while True:
                name, path = left.popleft()
                try:
                    news.put((name, _sha256(path, lambda: news.put(None))))
                except OSError as error:
                    news.put((name, error))

    for _ in range(min(len(files), len(os.sched_getaffinity(0)), _MOST_THREADS)):
        threading.Thread(target=read, name="tiercache-digest", daemon=True).start()
    digests: dict[str, _Digest] = {}
    try:
        while len(digests) < len(files):
            outcome = news.get(timeout=_STALL_S)
            if outcome is None:
                continue
            name, digest = outcome
            if isinstance(digest, OSError):
                raise digest
            digests[name] = digest
    except Empty:
        raise TimeoutError(f"not a byte of {', '.join(sorted(files))} came for {_STALL_S:.0f} s") from None
    finally:
        left.clear()
    size_bytes, took_s = sum(digest.stamp[0] for digest in digests.values()), time.monotonic() - began_s
    logger.info("read %.2f GB of weights for their identity in %.1f s", size_bytes / 1e9, took_s)
    return digests


def _sha256(path: Path, on_part: Callable[[], None]) -> _Digest:
    part = memoryview(bytearray(_PART_BYTES))
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        before = stamp_of(os.fstat(file.fileno()))
        settled = time.time_ns() - max(before[1:3]) >= GRAIN_NS
        while read := file.readinto(part):
            digest.update(part[:read])
            on_part()
        if stamp_of(os.fstat(file.fileno())) != before:
            raise OSError(f"{path} was written to while it was read for the model's identity")
    return _Digest(digest.hexdigest(), before, settled)


def _places(directory: Path) -> Iterator[Path]:
    yield directory / KEPT
    with contextlib.suppress(RuntimeError):  # no home directory
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        name = hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:32]
        yield Path(cache) / "tiercache" / "digests" / f"{name}.json"


def _kept(directory: Path) -> dict[str, _Digest]:
    """Return the digests that are kept in all places. Earlier places have precedence."""
    kept: dict[str, _Digest] = {}
    for place in reversed(list(_places(directory))):
        kept |= _read_kept(place)
    return kept


def _read_kept(place: Path) -> dict[str, _Digest]:
    """Return the digests kept in a file; empty if it is missing, or not in the form that `_keep` writes."""
    try:
        return {name: _Digest(sha256, tuple(stamp)) for name, (sha256, stamp) in json.loads(place.read_bytes()).items()}
    except Exception:  # damaged content has any form
        return {}


def _keep(directory: Path, digests: dict[str, _Digest]) -> None:
    """Add digests to the first place that is writable."""
    if not digests:
        return
    for place in _places(directory):
        kept = {name: (digest.sha256, digest.stamp) for name, digest in sorted((_read_kept(place) | digests).items())}
        making = place.with_name(f"{place.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                making.write_text(json.dumps(kept, indent=1))
                making.replace(place)
                return
            finally:
                making.unlink(missing_ok=True)
    logger.info("digests of the model's files can be kept nowhere: each start reads them; model_id spares that")


def stamp_of(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _name_of_blob(path: Path) -> str | None:
    """Return the SHA-256 in the name of a Hugging Face file (snapshots/COMMIT/NAME links to blobs/SHA256), or None.

    Follows one link only: a blob may itself be a link to a file that is named by another hash.
    """
    try:
        blob = path.parent / os.readlink(path)
        # The link was made when the blob was complete. A newer blob was written to since, so its name may be wrong.
        newer = path.stat().st_mtime_ns - path.lstat().st_mtime_ns > GRAIN_NS
    except OSError:
        return None
    if newer or blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name):
        return None
    return blob.name


_SAFETENSORS = "*.safetensors"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.gguf", "*.tensors")
_NO_WEIGHTS = ("adapter_model.*", "training_args.bin", "optimizer.*", "scheduler.pt", "scaler.pt")
"""Files of a LoRA beside the model, and of training. vLLM also excludes the latter by name."""
_READ_BESIDE = ("*.safetensors.index.json", "*quant*config.json", "*processor_config.json", "tekken.json")
"""Files that map tensors to shards, or tell how weights are quantised and how images and sound become embeddings."""
_OF_ADAPTER = ("adapter_model.*", "adapter_config.json", "*.safetensors", "*.bin", "*.pt", "*.tensors")
_CHECKPOINTS = ("checkpoint-*", "global_step*")
_SAFETENSORS_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer")
"""Load formats of vLLM and SGLang that read no other weights if there are safetensors."""
_OTHER_HUBS = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")


class NothingToRead(OSError):
    """Raised if a place has no weights."""


def identity_of_model(model: Path, load_format: str = "auto", *, with_code: bool = False) -> str:
    """Return 32 hex digits for `model`, a directory or a single file (GGUF). With `with_code` its Python modules count.

    Reads all weights without a known digest, at the speed of the disk or of SHA-256 (see `digests_of`). Raises OSError
    if that fails, NothingToRead if there are no weights.
    """
    if model.is_file():
        return _identity_of_file(model)
    files = dict(_below(model))
    candidates = files.keys() - _matching(files, _NO_WEIGHTS)
    weights = _matching(candidates, (_SAFETENSORS,))
    if load_format not in _SAFETENSORS_FORMATS or all("/" in name for name in weights):
        weights |= _matching(candidates, _OTHER_WEIGHTS)
    if not weights:
        raise NothingToRead(f"no weights in {model}")
    wanted = weights | _matching(files, (*_READ_BESIDE, *(("*.py",) if with_code else ())))
    return _combined(digests_of({name: files[name] for name in wanted}, model))


def identity_of_adapter(directory: Path) -> str:
    """Return 32 hex digits for a LoRA's directory. Raises the same errors as `identity_of_model`."""
    files = adapter_files(directory)
    if not files:
        raise NothingToRead(f"no adapter in {directory}")
    return _combined(digests_of(files, directory))


def adapter_files(directory: Path) -> dict[str, Path]:
    """Return the files of a LoRA, by name. Raises OSError."""
    files = {path.name: path for path in directory.iterdir()}
    return {name: files[name] for name in _matching(files, _OF_ADAPTER)}


def _identity_of_file(model: Path) -> str:
    """Return the identity of a model file of any name, with its split parts and mmproj files (llama.cpp's names)."""
    prefix, parts = model.name, {model.name: model}
    if split := re.fullmatch(r"(.+)-\d{5}(-of-\d{5}\.gguf)", model.name):
        prefix = split[1]
        parts = {path.name: path for path in model.parent.glob(f"{glob.escape(prefix)}-?????{split[2]}")}
    beside = {path.name: path for path in model.parent.glob("mmproj*.gguf")}
    digests = digests_of(beside | parts, model.parent)
    return _combined({name.removeprefix(prefix): digest for name, digest in digests.items()})


def _combined(digests: dict[str, str]) -> str:
    return hashlib.blake2b(json.dumps(sorted(digests.items())).encode(), digest_size=16).hexdigest()


def _below(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of files in `directory` and its subdirectories, where some models have parts."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            yield path.name, path
        elif not any(fnmatch(path.name, pattern) for pattern in _CHECKPOINTS):
            yield from ((f"{path.name}/{file.name}", file) for file in sorted(path.iterdir()) if file.is_file())


def _matching(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    return {name for name in names for pattern in patterns if fnmatch(name.rpartition("/")[2], pattern)}


def place_of(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Return the file or directory, or the snapshot in the Hugging Face cache if `model` is a name, or None.

    Contacts no server. `cache` is the directory of the Hugging Face cache, if not the usual one.
    """
    place = Path(model).expanduser()
    if place.exists():
        return place
    if any(os.environ.get(variable, "").strip().lower() in ("1", "true") for variable in _OTHER_HUBS):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        return None
