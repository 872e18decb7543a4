"""Where the engine's KV lies, and who moves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiercache.assembly import make_cpu_driver
from tiercache.config import Config
from tiercache.device.driver import CudaDriver, Driver
from tiercache.errors import LayoutError
from tiercache.integrations.vllm.device_blocks import DeviceKvBlocks
from tiercache.integrations.vllm.device_mover import DeviceMover
from tiercache.integrations.vllm.host_mover import HostMover
from tiercache.integrations.vllm.kv_blocks import KvBlocks
from tiercache.integrations.vllm.moves import Mover
from tiercache.integrations.vllm.planning import HeadParts, KvGroup


def make_mover(
    config: Config, tensors: Mapping[str, Any], blocks: int, groups: Sequence[KvGroup], parts: HeadParts | None = None
) -> Mover:
    """`groups` as the geometry has them, where it has any. Raises LayoutError for KV that cannot be moved from where it lies
    or was not verified; DeviceError without driver."""
    driver = _driver_of(config, tensors)
    windows = [position for position, group in enumerate(groups) if group.window_tokens is not None]
    if driver is None:
        return HostMover(
            [_in_host_memory(_of(group, tensors, parts), blocks, group, parts) for group in groups], windows
        )
    kvs = [_in_device_memory(driver, _of(group, tensors, parts), blocks, group, parts) for group in groups]
    for kv in kvs:
        kv.kv.warm_up()
    return DeviceMover(kvs, windows)


def _of(group: KvGroup, tensors: Mapping[str, Any], parts: HeadParts | None) -> Mapping[str, Any]:
    """The group's tensors; of its part of the heads, views."""
    if group.layers:
        tensors = {name: tensors[name] for name in group.layers if name in tensors}
    if parts is None:
        return tensors
    heads = group.spec.num_kv_heads // parts.here
    return {name: tensor[:, group.part * heads : (group.part + 1) * heads] for name, tensor in tensors.items()}


def _in_host_memory(tensors: Mapping[str, Any], blocks: int, group: KvGroup, parts: HeadParts | None) -> KvBlocks:
    spec = group.spec
    if group.recurrent:
        return KvBlocks(
            tensors,
            blocks=blocks,
            heads=spec.num_heads,
            block_tokens=spec.block_size,
            state_bytes=spec.state_content_size_bytes,
        )
    return KvBlocks(
        tensors,
        blocks=blocks,
        heads=spec.num_kv_heads // (parts.here if parts else 1),
        block_tokens=spec.block_size,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        part=parts is not None,
    )


def _in_device_memory(
    driver: Driver, tensors: Mapping[str, Any], blocks: int, group: KvGroup, parts: HeadParts | None
) -> DeviceKvBlocks:
    spec = group.spec
    return DeviceKvBlocks(
        driver,
        tensors,
        blocks=blocks,
        heads=spec.num_heads // (parts.here if parts else 1),
        block_tokens=spec.block_size,
        content_bytes=spec.state_content_size_bytes,
        states=group.recurrent,
    )


def _driver_of(config: Config, tensors: Mapping[str, Any]) -> Driver | None:
    """The driver of the device that holds the KV; None for host memory."""
    devices = {str(tensor.device): tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        raise LayoutError(f"expected the KV of all layers on one device, found {', '.join(sorted(devices)) or 'no KV'}")
    ((name, device),) = devices.items()
    if device.type == "cpu":
        return make_cpu_driver() if config.device == "cpu" else None
    if device.type != "cuda":
        raise LayoutError(f"expected KV in host memory or on a CUDA GPU, found it on {name}")
    if config.device != "auto":
        raise LayoutError(
            f"the KV lies on {name}, and the configuration says device: {config.device}; use device: auto"
        )
    return CudaDriver(device.index or 0)
