"""What a request may say about itself, and what is made of nonsense."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.integrations.vllm.hints import Wishes, wishes_of


def saying(parameters: Any) -> Any:
    """A request with these `kv_transfer_params`."""
    return SimpleNamespace(kv_transfer_params=parameters)


def test_everything_that_can_be_said() -> None:
    said: dict[str, Any] = {"tiercache.session": "s", "tiercache.next_in_s": 3, "tiercache.pin_s": 0.5}
    said |= {"tiercache.forget": True, "tiercache.session_over": True, "tiercache.expect_tokens": 300}
    said["do_remote_prefill"] = False
    assert wishes_of(saying(said), set()) == Wishes("s", 3.0, 0.5, True, True, 300)
    assert not Wishes(expect_tokens=3).at_the_end and Wishes(next_in_s=0.0).at_the_end


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("session", value) for value in (7, "", "x" * 257)],
        *[("next_in_s", value) for value in ("soon", True, -1, float("nan"))],
        pytest.param("next_in_s", 10**5000, id="huge"),
        ("pin_s", float("inf")),
        *[("forget", value) for value in (1, "yes")],
        *[("expect_tokens", value) for value in (-1, True, 1e3)],
        ("sesion", "s"),
        ("", None),
    ],
)
def test_what_is_wrong_is_warned_about_once(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    warned: set[str] = set()
    with caplog.at_level(logging.WARNING, "tiercache.vllm"):
        for _ in range(3):
            wishes = wishes_of(saying({f"tiercache.{name}": value, "tiercache.session_over": True}), warned)
            assert wishes == Wishes(session_over=True)
    (record,) = caplog.records
    assert "is ignored: expected" in record.getMessage()
    wishes_of(saying({f"tiercache.{number}": 1 for number in range(1000)}), warned)
    assert len(warned) == 100, "warnings are bounded"


@pytest.mark.parametrize("parameters", [None, [], "tiercache.forget", 3, {1: 2}, {("tiercache.forget",): True}])
def test_what_is_no_object_says_nothing(parameters: Any) -> None:
    assert wishes_of(saying(parameters), set()) == Wishes()


def test_value_that_is_nested_too_deep_to_be_shown_is_ignored_like_others() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert wishes_of(saying({"tiercache.pin_s": deep, "tiercache.session": "s"}), set()) == Wishes(session="s")


def test_vllms_own_hints_and_session_are_read_and_what_is_said_to_us_wins() -> None:
    from vllm.v1 import kv_hints as hints

    said = {"tiercache.pin_s": 3.0, "tiercache.next_in_s": 1.0, "other.pin_s": 1.0}
    hinted = hints.KvHintsEnvelope("1", "m", [hints.KvHintAction("1", "pin", "1", said)])
    ours = {"tiercache.next_in_s": 2.0, 5: 6}
    request = SimpleNamespace(session_id="chat", kv_hints=hinted, kv_transfer_params=ours)
    assert wishes_of(request, set()) == Wishes("chat", 2.0, 3.0)
    assert wishes_of(SimpleNamespace(session_id=None, kv_hints=None, kv_transfer_params=None), set()) == Wishes()
