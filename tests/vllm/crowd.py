"""Many requests of many kinds through one engine, while things happen to it and to its cache. Used by drive.py."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

UNFINISHED = 12
"""At any time, as long as there are more."""


def run_crowd(
    driver: Any, prompts: list[list[int]], requests: list[dict[str, Any]], happenings: dict[str, list[Any]]
) -> dict[str, Any]:
    """Requests begin in their order. A request: {"prompt": position, "tokens": so many, "kind": name, "abort": after so many
    steps}. `happenings`: step -> a name of `_HAPPENINGS` and its arguments."""
    engine = driver.llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counting(request: Any, *arguments: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *arguments, **named)

    scheduler._preempt_request = counting
    answers: dict[str, Any] = {}
    aborts: Counter[int] = Counter()
    waiting = list(enumerate(requests))[::-1]
    unfinished: set[str] = set()
    give_up: dict[str, int] = {}
    steps = 0
    happened: Counter[str] = Counter()
    while waiting or unfinished:
        while waiting and len(unfinished) < UNFINISHED:
            number, request = waiting.pop()
            name = f"r{number}"
            _begin(engine, name, prompts[request["prompt"]], request)
            unfinished.add(name)
            if request.get("abort"):
                give_up[name] = steps + request["abort"]
        for answer in engine.step():
            if answer.finished:
                answers[answer.request_id] = _described(answer)
                unfinished.discard(answer.request_id)
        steps += 1
        over = [name for name, when in give_up.items() if when <= steps]
        for name in over:
            del give_up[name]
        given_up = [name for name in over if name in unfinished]
        if given_up:
            engine.abort_request(given_up)
            aborts[len(given_up)] += len(given_up)
            unfinished.difference_update(given_up)
        if (what := happenings.get(str(steps))) is not None:
            happened[what[0]] += 1
            _HAPPENINGS[what[0]](driver, scheduler, *what[1:])
    scheduler._preempt_request = preempt
    return {
        "answers": answers,
        "aborted": sum(aborts.values()),
        "preempted": len(preempted),
        "steps": steps,
        "happened": dict(happened),
    }


def _begin(engine: Any, name: str, tokens: list[int], request: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    wanted: dict[str, Any] = {"max_tokens": request["tokens"], "temperature": 0, "ignore_eos": True, "logprobs": 1}
    wanted["output_kind"] = RequestOutputKind.FINAL_ONLY
    prompt: dict[str, Any] = {"prompt_token_ids": tokens}
    priority = 0
    match request["kind"]:
        case "two":
            wanted |= {"n": 2, "temperature": 1.0, "top_p": 1e-6}
        case "salted":
            prompt["cache_salt"] = f"salt {request['prompt'] % 3}"
        case "prompt logprobs":
            wanted["prompt_logprobs"] = 1
        case "urgent":
            priority = -1
    engine.add_request(name, prompt, SamplingParams(**wanted), priority=priority)


def _described(answer: Any) -> dict[str, Any]:
    return {
        "tokens": [list(one.token_ids) for one in answer.outputs],
        "logprobs": [
            [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)] for one in answer.outputs
        ],
        "cached": answer.num_cached_tokens or 0,
    }


def _preempt(driver: Any, scheduler: Any) -> None:
    with contextlib.suppress(RuntimeError):  # blocks that are still being saved cannot be reset
        scheduler.reset_prefix_cache(reset_running_requests=True)


_HAPPENINGS: dict[str, Any] = {
    "preempt": _preempt,
    "damage": lambda driver, _, *arguments: driver.damage_files(*arguments),
    "remove": lambda driver, _, *arguments: driver.remove_files(*arguments),
    "clear hot": lambda driver, _: driver.clear_hot(),
    "weights changed": lambda driver, scheduler: scheduler.connector.reset_cache(),
}
