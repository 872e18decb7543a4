"""Real vLLM: what requests say in `kv_transfer_params`, and what other programs say through the control socket."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.vllm.answers import same_answer
from tests.vllm.engines import CHUNK_TOKENS, drive_named, tiercache_settings

CHUNKS = 4
"""Of each prompt: 256 of its tokens are whole blocks."""


@pytest.fixture(scope="module")
def life(model: str, prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """One engine's answers, by the name of the step."""
    directory = tmp_path_factory.mktemp("kv")
    socket = str(tmp_path_factory.mktemp("s") / "c.sock")

    def control(command: str, prompt: str | None = None, **fields: Any) -> list[Any]:
        return ["control", socket, command, fields, prompt]

    def say(prompt: str, **said: Any) -> list[Any]:
        return ["generate_saying", prompt, {f"tiercache.{name}": value for name, value in said.items()}]

    first, second = prompts
    wrong = say(first, pin_s="soon", forgit=True, session=7)
    wrong[2]["other"] = object.__name__
    flush: tuple[str, list[Any]] = ("flush", ["flush"])
    idle: tuple[str, list[Any]] = ("idle", ["idle"])
    steps: list[tuple[str, list[Any]]] = [
        *(("wrong", wrong), ("wrong again", wrong), flush, ("found", control("lookup", first))),
        *(("found salted", control("lookup", first, cache_salt="tenant")), ("salted", [*say(first), "tenant"]), flush),
        ("found after salted", control("lookup", first, cache_salt="tenant")),
        *(("coming", say(first, session="s", next_in_s=5)), idle),
        ("held", ["control_until", socket, {"held": CHUNKS, "sessions": 1}]),
        *(("came", say(first, session="s", pin_s=600)), idle),
        ("pinned", ["control_until", socket, {"held": 0, "pinned": CHUNKS}]),
        *(("over", say(first, session="s", session_over=True)), idle),
        *(("after over", ["control_until", socket, {"sessions": 0}]), ("unpin", control("unpin", first))),
        *(("cold", ["clear_hot"]), ("announced", control("prefetch", first, handle="h", deadline_s=1))),
        *(("promoted", control("progress", handle="h", until_s=30)), ("prefetched", ["generate", [first]])),
        ("used", control("statistics")),
        *(("to forget", say(second, forget=True)), idle, flush, ("forgotten", control("lookup", second))),
        *(("computed", say(second)), flush, ("kept", control("lookup", second))),
        *(("forget", control("forget", second)), ("gone", control("lookup", second))),
        *(("reset", ["reset_prefix_cache", True]), idle, ("found after reset", control("lookup", first))),
        *(("anew", ["generate", [first]]), flush, ("found anew", control("lookup", first))),
    ]
    settings = tiercache_settings(directory, control_socket=socket)
    return drive_named({"model": model, "enable_prefix_caching": False, "tiercache": settings}, steps)


Life = tuple[dict[str, Any], str]


def test_announced_tokens_get_the_names_that_a_request_gets(life: Life) -> None:
    answers, _ = life
    assert answers["wrong"]["prompt_tokens"] // CHUNK_TOKENS == CHUNKS
    assert answers["found"]["found"] == answers["found"]["asked"] == CHUNKS
    assert answers["found salted"]["found"] == 0
    assert answers["found after salted"]["found"] == answers["found"]["found"]


def test_a_prefetched_prompt_is_a_hit_in_ram(life: Life, oracle: list[dict[str, Any]]) -> None:
    answers, log = life
    promoted = answers["promoted"]
    assert promoted["promoted"] == promoted["asked"] >= 4 and promoted["missing"] == 0
    assert same_answer(answers["prefetched"], oracle[0])
    lines = re.findall(r"hit tokens: (\d+) \(cpu: (\d+), disk: (\d+)\)", log)
    assert len([line for line in lines if line[2] != "0"]) == 0, "everything that was prefetched came out of RAM"
    used = answers["used"]["statistics"]["prefetch"]["hints"]
    assert used["used_bytes"] > 0 and used["wasted_bytes"] == used["late_bytes"] == 0


def test_what_is_wrong_is_said_once_and_fails_no_request(life: Life, oracle: list[dict[str, Any]]) -> None:
    answers, log = life
    assert same_answer(answers["wrong again"], oracle[0])
    for name in ("pin_s", "forgit", "session"):
        assert len(re.findall(rf"what a request says: 'tiercache\.{name}' is ignored: expected", log)) == 1


def test_request_says_that_it_comes_again_and_what_to_keep(life: Life) -> None:
    answers, _ = life
    assert (answers["held"]["held"], answers["held"]["sessions"]) == (CHUNKS, 1)
    assert (answers["pinned"]["held"], answers["pinned"]["pinned"]) == (0, CHUNKS)
    assert answers["after over"]["sessions"] == 0


def test_what_a_request_wants_forgotten_is_in_no_tier(life: Life) -> None:
    answers, _ = life
    assert answers["forgotten"]["found"] == 0
    assert answers["computed"]["cached"] == 0
    assert answers["kept"]["found"] >= 4
    assert answers["gone"]["found"] == 0


def test_after_a_reset_announced_tokens_get_the_new_names(life: Life) -> None:
    answers, _ = life
    assert answers["found after reset"]["found"] == 0
    assert answers["found anew"]["found"] == answers["found"]["found"]
