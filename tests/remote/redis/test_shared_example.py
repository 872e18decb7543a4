"""examples/redis_shared.py: what it leaves on a server that stays."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from tests.examples import load_example
from tiercache.demo.server import ServerFailed


@pytest.fixture
def example() -> ModuleType:
    return load_example("redis_shared")


def test_values_are_removed_after_the_servers_have_ended_also_if_one_fails(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    @contextmanager
    def serving(*_: Any) -> Iterator[None]:
        try:
            yield
        finally:
            happened.append("a server ended")

    def ask(*_: Any) -> None:
        raise ServerFailed("it died")

    monkeypatch.setattr(example, "prepare_model", lambda: None)
    monkeypatch.setattr(example, "long_message", lambda model, tokens: "")
    monkeypatch.setattr(example, "serving", serving)
    monkeypatch.setattr(example, "ask", ask)
    monkeypatch.setattr(example, "forget", lambda url, prefix: happened.append(f"removed from {url}"))
    with pytest.raises(ServerFailed):
        example.main("redis://here", 1000)
    assert happened == ["a server ended", "a server ended", "removed from redis://here"]
