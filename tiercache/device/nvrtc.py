"""Compiling kernels at run time with NVRTC, which comes with torch's CUDA libraries: no compiler on the machine."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

from tiercache.device.driver import DeviceError
from tiercache.device.twin import KERNELS

_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def compile_for_gpu(capability: tuple[int, int], source: Path = KERNELS) -> tuple[bytes, list[str]]:
    """Machine code of `source` for a GPU of this compute capability, and the names of its kernels. Needs no GPU itself.

    Raises DeviceError when NVRTC is not installed or does not know the GPU. Takes about half a second.
    """
    nvrtc = _library()
    text = source.read_text()
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), source.name.encode(), 0, None, None))
    try:
        options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status:
            raise DeviceError(f"{source.name}: {_log(nvrtc, program) or f'NVRTC error {status}'}")
        size = ctypes.c_size_t()
        _check(nvrtc, nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, binary))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw, re.findall(r'extern "C" __global__ void (\w+)', text)


def _library() -> ctypes.CDLL:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvrtc")
    except Exception:
        pass  # not installed, or it found none: the names below may still do
    wheels = [path for place in sys.path for path in sorted(Path(place).glob("nvidia/*/lib/libnvrtc.so.1?"))]
    for name in (*_NAMES, *wheels):
        try:
            if isinstance(name, Path):  # of which it opens a part by its bare name
                for part in name.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(part))
            return ctypes.CDLL(str(name))
        except OSError:
            continue
    raise DeviceError("NVRTC was not found: pip install nvidia-cuda-nvrtc (torch's CUDA build brings it)")


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(max(1, size.value))
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace").strip()


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        raise DeviceError(f"NVRTC error {status}")
