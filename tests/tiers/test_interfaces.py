"""What stands in front of a tier, or extends one, leaves nothing of the interface out."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

import tiercache.testing
import tiercache.tiers
from tests.torture.simulation.own import BehindWeather
from tiercache.testing import FaultyTier, MemoryTier, chunk, page_aligned
from tiercache.testing.wrapped import WrappedTier
from tiercache.tiers.base import DeviceTier, Tier
from tiercache.tiers.files.directories import ChunkIO
from tiercache.tiers.files.index import ProbingLookup
from tiercache.tiers.remote.base import RemoteTier
from tiercache.tiers.remote.fs import FsTier
from tiercache.tiers.remote.redis import RedisTier
from tiercache.tiers.shared_memory import SharedMemoryTier

KEY, PAYLOAD = chunk(1)
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "use_arena": (None,),
    "open": (),
    "close": (),
    "describe": (),
    "contains": (KEY,),
    "offers": (KEY,),
    "tell": (lambda key: None,),
    "prefix": ([KEY],),
    "probe": ([KEY],),
    "probe_each": ([KEY],),
    "read": (KEY, page_aligned(PAYLOAD.nbytes)),
    "prefetch": (KEY, page_aligned(PAYLOAD.nbytes)),
    "hurry": (KEY,),
    "write": (KEY, PAYLOAD, PAYLOAD.nbytes),
    "read_device": (KEY, None),
    "write_device": (KEY, None, PAYLOAD.nbytes),
    "used": ([KEY],),
    "continued": ([KEY],),
    "remove": (KEY,),
    "statistics": (),
}
"""Of every method; `offered` returns what answers as `offers` does."""


def methods_of(interface: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(interface, inspect.isfunction) if not name.startswith("_")}


class Asked(MemoryTier, DeviceTier):
    """Notes which of its methods are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ARGUMENTS:
            super().__getattribute__("calls").append(name)
        return super().__getattribute__(name)

    @property
    def serves_device(self) -> bool:
        return True

    async def read_device(self, key: bytes, into: object) -> int | None:
        return None

    async def write_device(self, key: bytes, payload: object, payload_bytes: int) -> bool:
        return True


@pytest.mark.parametrize("wrapper", [WrappedTier, FaultyTier])
@pytest.mark.parametrize("name", ARGUMENTS)
async def test_wrapper_forwards(wrapper: type[WrappedTier], name: str) -> None:
    asked = Asked()
    tier = wrapper(asked)
    asked.calls.clear()
    result = getattr(tier, name)(*ARGUMENTS[name])
    if inspect.isawaitable(result):
        await result
    assert ("contains" if name == "offers" else name) in asked.calls


def test_arguments_of_every_method_are_known() -> None:
    assert methods_of(DeviceTier) - {"offered"} == ARGUMENTS.keys()


def modules_below(package: Any) -> Iterator[str]:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield module.name


def subclasses(base: type, *packages: Any) -> set[type]:
    """Every class of ours below `base`, of modules that can be imported here."""
    for package in packages:
        for module in modules_below(package):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    found, left = set[type](), [base]
    while left:
        below: list[type] = left.pop().__subclasses__()
        found.update(below)
        left += below
    return {one for one in found if one.__module__.startswith(("tiercache.", "tests.torture."))}


TIERS = subclasses(Tier, tiercache.tiers, tiercache.testing)


def test_all_tiers_are_looked_at() -> None:
    assert {FaultyTier, BehindWeather, FsTier, RedisTier, SharedMemoryTier} <= TIERS


def test_what_stands_in_front_of_a_tier_is_a_wrapped_tier() -> None:
    wrappers = {one for one in TIERS if "Tier" in inspect.get_annotations(vars(one).get("__init__", one)).values()}
    assert wrappers == {WrappedTier, FaultyTier, BehindWeather}
    assert all(issubclass(one, WrappedTier) for one in wrappers)


def halves(classes: Iterable[type], roots: set[type], together: Iterable[Sequence[str]]) -> list[str]:
    """What overrides one method of a set, and inherits another that a class below the roots has for its own way."""
    found = []
    for one in classes:
        own = [base for base in one.__mro__[1:] if base not in roots]
        for names in together:
            overridden = {name for name in names if name in vars(one)}
            inherited = {name for name in names if any(name in vars(base) for base in own)} - overridden
            if overridden and inherited:
                found.append(f"{one.__qualname__} overrides {sorted(overridden)}, and inherits {sorted(inherited)}")
    return sorted(found)


def test_a_tier_that_changes_one_way_to_a_chunk_changes_the_others() -> None:
    together = [("read", "prefetch"), ("probe", "probe_each"), ("contains", "prefix", "offered"), ("used", "continued")]
    assert halves(TIERS, {Tier, DeviceTier, RemoteTier, object}, together) == []


@pytest.mark.parametrize(
    ("part", "together"),
    [
        (ChunkIO, [("read", "prefetch"), ("write", "write_places")]),
        (ProbingLookup, [("probe", "probe_each")]),
    ],
)
def test_a_part_of_a_file_tier_that_changes_one_way_to_a_chunk_changes_the_others(
    part: type, together: list[tuple[str, ...]]
) -> None:
    assert halves(subclasses(part, tiercache.tiers), {part, ABC, object}, together) == []
