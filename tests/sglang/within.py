"""The process that has imported SGLang: for each line of its input it forks, and the child runs a test.

SGLang needs a GPU to serve, and its modules import much that only a GPU has a use for. Its storage interface imports with
torch alone. For host pools and cache controllers, which are tested as they are, packages that are not installed here have
stand-ins that are never called, and SGLang's C++ hash, which would be compiled first, has one in Python.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import struct
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ABSENT = ("IPython", "orjson", "sgl_kernel", "torchvision", "triton")


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def import_sglang(installed: Path) -> None:
    import torch
    import torch.utils.flop_counter  # looks for triton, and for the true one
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)
    sys.modules["vllm"] = None  # type: ignore[assignment]  # SGLang looks for its kernels, which takes seconds
    sys.meta_path.append(_Finder())
    # Its own __init__ imports the front end.
    package = types.ModuleType("sglang")
    package.__path__ = [str(installed / "sglang")]
    sys.modules["sglang"] = package
    from sglang.srt.mem_cache.cpp_utils import native_hash

    native_hash.get_native_hash = page_hashes
    importlib.import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller")
    importlib.import_module("sglang.srt.mem_cache.pool_host.mamba")
    importlib.import_module("tiercache.integrations.sglang.storage")


def page_hashes(tokens: Sequence[int], before: bytes | None, page_size: int | None = None) -> list[str]:
    """As SGLang's: SHA-256 over the hash before and the page's token ids, four bytes each, in hex."""
    assert page_size is not None
    hashes = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = struct.pack(f"<{page_size}I", *tokens[start : start + page_size])
        before = hashlib.sha256((before or b"") + page).digest()
        hashes.append(before.hex())
    return hashes


def run(task: dict[str, Any]) -> dict[str, Any]:
    function = inspect.unwrap(getattr(importlib.import_module(task["module"]), task["test"]))
    given = task["given"] | {name: Path(task["given"][name]) for name in task["paths"]}
    try:
        function(**given)
    except BaseException:
        return {"status": 1, "said": traceback.format_exc()}
    return {"status": 0, "said": ""}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import_sglang(Path(sys.argv[1]))
    for line in sys.stdin:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            answer = json.dumps(run(json.loads(line)))
            with os.fdopen(writing, "w") as file:
                file.write(answer)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            said = file.read()
        _, status = os.waitpid(child, 0)
        died = {"status": 1, "said": f"ended with status {status}"}
        print(said or json.dumps(died), file=answers, flush=True)


if __name__ == "__main__":
    main()
