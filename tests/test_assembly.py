"""Which device a configuration makes the cache use."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.device.twin import TwinDriver
from tiercache import Config, Layout
from tiercache.assembly import make_device, make_tiers
from tiercache.core.header import file_bytes
from tiercache.errors import ConfigError, DeviceError

LAYOUT = Layout("m", chunk_tokens=16, bytes_per_token=64)
FS = "remote_storage_plugin.fs.a"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ordinal: int) -> None:
        raise DeviceError(f"cuda:{ordinal}: no NVIDIA driver")

    monkeypatch.setattr("tiercache.assembly.CudaDriver", refuse)


def gds(path: Path, **more: Any) -> Config:
    return Config(gds_path=(str(path),), gds_buffer_size=1, **more)


def test_none_is_never_even_when_a_driver_is_handed_in(tmp_path: Path) -> None:
    driver = TwinDriver()
    assert make_device(gds(tmp_path, device="none"), LAYOUT, driver, 0) is None
    driver.close()


def test_cpu_needs_no_gpu_and_no_tier(no_gpu: None) -> None:
    device = make_device(Config(device="cpu"), LAYOUT, None, 0)
    assert device is not None and device.driver.name == "cpu"
    device.close()


def test_cpu_with_too_large_a_pool_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.assembly.available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError):
        make_device(Config(device="cpu", gds_path=(str(tmp_path),), gds_buffer_size=64), LAYOUT, None)


@pytest.mark.usefixtures("no_gpu")
def test_auto_goes_on_without_a_gpu(tmp_path: Path) -> None:
    assert make_device(Config(), LAYOUT, None) is None
    assert make_device(Config(), LAYOUT, None, 3) is None
    assert make_device(gds(tmp_path), LAYOUT, None) is None


def test_driver_that_was_handed_in_has_to_work() -> None:
    driver = TwinDriver()
    driver.lose()
    with pytest.raises(ConfigError, match="lost"):
        make_device(Config(), LAYOUT, driver)
    driver.close()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("max_local_disk_size", {"local_disk": "DIR"}),
        ("max_shared_memory_size", {"shared_memory_path": "DIR"}),
        ("max_gds_size", {"gds_path": "DIR", "gds_buffer_size": 16}),
        ("max_hf3fs_size", {"remote_storage_plugins": "hf3fs", "hf3fs_base_path": "DIR"}),
        (f"{FS}.max_size", {"remote_storage_plugins": "fs.a", f"{FS}.base_path": "DIR"}),
    ],
)
def test_cap_that_holds_no_chunk_is_refused(tmp_path: Path, key: str, values: dict[str, Any]) -> None:
    settings = {name: str(tmp_path) if value == "DIR" else value for name, value in values.items()}
    with pytest.raises(ConfigError, match=f"^{key}: .* GB hold no chunk"):
        make_tiers(Config.load(overrides=settings | {key: 1e-6}), Layout("m", 16, 4096))


@pytest.mark.parametrize("key", ["max_local_disk_size", "tenant_max_local_disk_size"])
@pytest.mark.parametrize(("sharding", "is_refused"), [("by_chunk", True), ("by_gpu", False)])
def test_cap_is_of_all_directories_that_a_rank_uses(tmp_path: Path, key: str, sharding: str, is_refused: bool) -> None:
    layout = Layout("m", 16, 4096)
    values = {
        "local_disk": [str(tmp_path / name) for name in "abcd"],
        "local_disk_path_sharding": sharding,
        "max_local_disk_size": 1.0,
        key: 3 * file_bytes(layout.chunk_bytes) / 2**30,
    }
    with pytest.raises(ConfigError, match=f"^{key}: .* in any of 4") if is_refused else nullcontext():
        make_tiers(Config.load(overrides=values), layout)
