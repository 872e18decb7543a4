"""Answers that have to be of a form, and beams: what the cache gives makes them what vLLM's own prefix cache makes them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, drive, same_answer, tiercache_settings

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 20}, "pages": {"enum": [1, 20, 300]}},
    "required": ["title", "pages"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": r"[A-Z][a-z]{3,8} [0-9]{4}"},
    "choice": {"choice": ["a licence", "a novel", "a cookbook"]},
}
WIDTH, BEAM_TOKENS = 3, 6

Answers = dict[str, Any]


@pytest.fixture(scope="module")
def answers(
    model: str, prompts: list[str], continued: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Answers, Answers]:
    """With what lies on the disk, and with vLLM's own prefix cache."""
    steps = [*(["generate_structured", prompts[0], form, 80] for form in FORMS.values())]
    steps.append(["beam_search", continued, WIDTH, BEAM_TOKENS])
    settings = tiercache_settings(tmp_path_factory.mktemp("kv"))
    engine: dict[str, Any] = {
        "model": model,
        "enable_prefix_caching": False,
        "max_logprobs": 2 * WIDTH,
        "structured_outputs_config": {"disable_any_whitespace": True, "backend": "xgrammar"},
    }
    filled: list[list[Any]] = [["loads_always"], ["generate", [*prompts, continued]], ["flush"], ["clear_hot"]]
    hit, *_ = drive(engine | {"tiercache": settings}, [*filled, *steps])
    own: list[list[Any]] = [["generate", [*prompts, continued]]]
    theirs, *_ = drive(engine | {"enable_prefix_caching": True}, [*own, *steps])
    names = [*FORMS, "beams"]
    return tuple(dict(zip(names, found[-len(names) :], strict=True)) for found in (hit, theirs))  # type: ignore[return-value]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_of_a_form_is_the_prefix_caches_answer(answers: tuple[Answers, Answers], form: str) -> None:
    hit, theirs = (each[form] for each in answers)
    assert hit["cached"] == theirs["cached"] == (hit["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert same_answer(hit, theirs)
    has_form = {
        "json": lambda text: json.loads(text).keys() == {"title", "pages"},
        "regex": lambda text: re.fullmatch(FORMS["regex"]["regex"], text) is not None,
        "choice": lambda text: text in FORMS["choice"]["choice"],
    }
    assert has_form[form](hit["text"])


def test_beams_are_the_prefix_caches_beams(answers: tuple[Answers, Answers]) -> None:
    hit, theirs = (each["beams"] for each in answers)
    assert len(hit) == WIDTH and len({tuple(beam["tokens"]) for beam in hit}) == WIDTH
    assert [beam["tokens"] for beam in hit] == [beam["tokens"] for beam in theirs]
    assert [beam["logprob"] for beam in hit] == pytest.approx([beam["logprob"] for beam in theirs], abs=1e-3)
