"""Which directories tiers on files take, and what they say about them when they begin."""

import logging
import subprocess
from pathlib import Path

import pytest

from tests.chunks import chunks_of
from tests.tiers import kinds
from tests.tiers.test_disk import fill, is_hit, opened
from tests.tiers.test_foreign_files import seen, store
from tiercache.errors import ConfigError
from tiercache.tiers.files import access
from tiercache.tiers.files.access import file_system_of
from tiercache.tiers.files.format import spread


@pytest.mark.parametrize(
    ("kind", "option"),
    [("disk", "local_disk"), ("gds", "gds_path"), ("weka", "weka_path"), ("fs", r"fs\.a\.base_path")],
)
@pytest.mark.parametrize("linked", ["itself", "its parent"])
async def test_one_directory_by_two_names_is_an_error_with_both(tmp_path: Path, kind: str, option: str, linked: str) -> None:
    real = tmp_path / "real" / "kv"
    real.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(real if linked == "itself" else real.parent)
    other = link if linked == "itself" else link / "kv"
    tier = kinds.make(kind, tmp_path / "more", real, other)
    with pytest.raises(ConfigError, match=rf"{option}: {real} and {other} are one directory"):
        await tier.open()
    await tier.close()


@pytest.mark.parametrize("there", [[], ["lost+found"], ["photos"]], ids=["empty", "disk", "in use"])
async def test_a_directory_is_taken_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture, there: list[str]) -> None:
    for name in there:
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.WARNING):
        async with opened(tmp_path):
            pass
    assert caplog.messages == []


@pytest.mark.needs("mount")
async def test_directory_on_a_mount_that_is_read_only_is_a_wrong_setting(small_device: Path) -> None:
    async with opened(small_device) as tier:
        await fill(tier, range(1, 3))
    subprocess.run(["mount", "-o", "remount,ro", small_device], check=True)
    with pytest.raises(ConfigError, match=f"local_disk: {chunks_of(small_device)} cannot be used: .*Read-only"):
        async with opened(small_device):
            pass


@pytest.mark.parametrize(
    ("below", "said"),
    [
        ("kv", "does not exist and is made on the root file system: if it belongs on a mount"),
        ("", "is empty and lies on the root file system: if it belongs on a mount, that is missing"),
    ],
)
async def test_directory_where_a_mount_may_be_missing_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, below: str, said: str
) -> None:
    """As at a boot at which the mount is late: `/mnt/nvme` is an empty directory."""
    if tmp_path.stat().st_dev != Path("/").stat().st_dev:
        pytest.skip("temporary files do not lie on the root file system")
    monkeypatch.setattr(access, "_ABOVE_MOUNTS", (str(tmp_path),))
    (tmp_path / "nvme").mkdir()
    directory = tmp_path / "nvme" / below
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with opened(directory) as tier:
                await fill(tier, range(1, 3))
    (message,) = caplog.messages
    assert message.startswith(f"{directory} {said}")


@pytest.mark.parametrize("kind", ["disk", "weka", "shared_memory"])
async def test_a_link_in_the_place_of_the_directory_of_chunks_is_an_error(place: Path, kind: str) -> None:
    async with kinds.opened(kind, place) as tier:
        await store(tier, range(1, 3))
    target = place.parent / "target"
    chunks_of(place).rename(target)
    chunks_of(place).symlink_to(target)
    before, mode = seen(target), target.stat().st_mode
    with pytest.raises(ConfigError, match=rf"{chunks_of(place)}"):
        async with kinds.opened(kind, place):
            pass
    assert (seen(target), target.stat().st_mode) == (before, mode)


@pytest.mark.parametrize("kind", ["disk", "fs", "weka", "shared_memory", kinds.HF3FS])
@pytest.mark.parametrize("linked", ["itself", "its parent"])
async def test_the_directory_may_be_a_link(place: Path, kind: str, linked: str) -> None:
    link = place.parent / "link"
    link.symlink_to(place if linked == "itself" else place.parent)
    configured = link if linked == "itself" else link / "kv"
    async with kinds.opened(kind, configured) as tier:
        assert await store(tier, range(1, 3)) == 2
    async with kinds.opened(kind, place) as tier:
        assert await is_hit(tier, 2)


@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
async def test_the_error_for_a_dangling_link_names_its_target(place: Path, kind: str) -> None:
    link = place.parent / "link"
    link.symlink_to(place.parent / "gone")
    with pytest.raises(ConfigError, match=f"{link} cannot be used: .*it is a link to {place.parent}/gone, which is missing"):
        async with kinds.opened(kind, link):
            pass
    assert not (place.parent / "gone").exists()


def test_directories_below_lie_apart_where_the_file_system_can_do_that(tmp_path: Path) -> None:
    """`lsattr` says T then; nothing changes where it has no such hint, or where there is no directory."""
    before = attributes(tmp_path)
    spread(tmp_path)
    spread(tmp_path / "missing")
    if file_system_of(tmp_path) != "ext4" or not before:
        pytest.skip("needs lsattr and a temporary directory on ext4")
    assert attributes(tmp_path) == before | {"T"}


def attributes(directory: Path) -> set[str]:
    said = subprocess.run(["lsattr", "-d", directory], capture_output=True, text=True, check=False).stdout
    return set(said.partition(" ")[0]) - {"-"}
