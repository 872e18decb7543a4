"""What stands in front of a tier leaves nothing of the interface out."""

import inspect
from typing import Any

import pytest

from tiercache.testing import FaultyTier, MemoryTier, chunk, page_aligned
from tiercache.testing.wrapped import WrappedTier
from tiercache.tiers.base import DeviceTier

KEY, PAYLOAD = chunk(1)
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "use_arena": (None,),
    "take_over": (WrappedTier(MemoryTier()),),
    "tell": (lambda key: None,),
    "read": (KEY, page_aligned(PAYLOAD.nbytes)),
    "write": (KEY, PAYLOAD, PAYLOAD.nbytes),
    "read_device": (KEY, None),
    "write_device": (KEY, None, PAYLOAD.nbytes),
    **dict.fromkeys(("open", "close", "describe", "statistics", "load_library"), ()),
    **dict.fromkeys(("contains", "offers", "remove"), (KEY,)),
    **dict.fromkeys(("prefix", "probe", "probe_each", "used", "continued"), ([KEY],)),
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
