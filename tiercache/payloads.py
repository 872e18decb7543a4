"""Convert payloads and buffers of callers into functions that a worker thread calls, and check times."""

from __future__ import annotations

import asyncio
from asyncio.events import _get_running_loop
from collections.abc import Callable
from math import isfinite
from typing import Any

import numpy as np

Source = Callable[[np.ndarray], None]
"""Fills a uint8 vector. Runs on a worker thread and should release the GIL for most of its time."""
Sink = Callable[[np.ndarray], None]
"""Gets the chunk as a read-only uint8 vector, on a worker thread."""


class PlainCopy:
    """A source that copies memory of this process, which cannot block. Short copies may run on the event loop."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __call__(self, slot: np.ndarray) -> None:
        """Copy the memory into `slot`, which has its length."""
        np.copyto(slot, self._array)


def source_of(payload: Any) -> tuple[int, Source]:
    """Return the length in bytes of a bytes-like object, numpy array or torch tensor, and a call that copies it to a slot.

    Nothing is copied here: an array that is not contiguous, or a tensor on a device, is gathered by the copying thread.
    """
    if is_tensor(payload):
        tensor = _bit_for_bit(payload)
        return tensor.numel() * tensor.element_size(), lambda slot: _tensor_view(slot, tensor).copy_(tensor)
    array = payload if isinstance(payload, np.ndarray) else np.frombuffer(payload, dtype=np.uint8)
    if array.flags.c_contiguous:
        memory = array.reshape(-1).view(np.uint8)
        return memory.nbytes, PlainCopy(memory) if _is_own_memory(array) else lambda slot: np.copyto(slot, memory)
    array = _without_fields(array)
    return array.nbytes, lambda slot: np.copyto(slot.view(array.dtype).reshape(array.shape), array)


def sink_of(buffer: Any) -> Sink:
    """Return the call that copies a verified chunk into a writable buffer, array or tensor.

    The call raises ValueError if lengths differ, which ends the prefix of the get.
    """
    if is_tensor(buffer):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            # torch accepts writable memory only, and the chunk is not: these rarer kinds cost a second copy.
            tensor, length = _bit_for_bit(buffer.detach()), buffer.numel() * buffer.element_size()
            return lambda chunk: tensor.copy_(_tensor_view(_exactly(chunk, length).copy(), tensor))
        buffer = _bytes_view(buffer)
    array = _without_fields(buffer) if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, dtype=np.uint8)
    if not array.flags.writeable:
        raise ValueError("the buffer is read-only")
    return lambda chunk: np.copyto(array, _exactly(chunk, array.nbytes).view(array.dtype).reshape(array.shape))


def _exactly(chunk: np.ndarray, length_bytes: int) -> np.ndarray:
    if chunk.nbytes != length_bytes:
        raise ValueError(f"the buffer has {length_bytes} bytes, the chunk {chunk.nbytes}")
    return chunk


def _without_fields(array: np.ndarray) -> np.ndarray:
    """Return the array with items of plain bytes: numpy copies structured items field by field, without the gaps."""
    return array if array.dtype.names is None else array.view(f"V{array.itemsize}")


def _is_own_memory(array: np.ndarray) -> bool:
    """Return True if Python or numpy allocated the array's memory. Other memory may belong to a file or another process."""
    owner: Any = array
    while type(owner) is np.ndarray and owner.base is not None:
        owner = owner.base
    return type(owner) in (np.ndarray, bytes)


def is_tensor(value: Any) -> bool:
    """Return True for a torch tensor, without importing torch, which takes seconds."""
    return type(value).__module__.partition(".")[0] == "torch"


def _bit_for_bit(tensor: Any) -> Any:
    """Return the tensor with a dtype whose bytes are copied unchanged: torch converts a bool to 0 or 1."""
    import torch

    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _tensor_view(memory: np.ndarray, like: Any) -> Any:
    import torch

    return torch.from_numpy(memory).view(like.dtype).reshape(like.shape)


def _bytes_view(tensor: Any) -> np.ndarray:
    """Return a uint8 vector over a contiguous CPU tensor of any dtype: numpy knows neither bfloat16 nor fp8."""
    import torch

    view: np.ndarray = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def check_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise RuntimeError unless `loop` is the running loop: the cache's state has no locks."""
    if _get_running_loop() is not loop:
        raise RuntimeError(
            "the cache belongs to the event loop that started it, and this call comes from elsewhere; use "
            "asyncio.run_coroutine_threadsafe(..., loop) or CacheThread, or open a cache of its own on this loop"
        )


def check_number(name: str, seconds: float) -> None:
    """Raise ValueError for NaN, which no time ever reaches. Infinite and past times are valid."""
    if seconds != seconds:
        raise ValueError(f"{name}: expected a number of seconds, found {seconds}")


def check_seconds(name: str, value_s: float) -> None:
    """Raise ValueError unless `value_s` is a finite number of seconds from 0 on."""
    if not (isfinite(value_s) and value_s >= 0):
        raise ValueError(f"{name}: expected a number of seconds from 0 on, found {value_s}")
