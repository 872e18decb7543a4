"""Many requests of many kinds through one engine, while things happen to it and to its cache. Used by drive.py."""

from __future__ import annotations

import contextlib
import math
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
    answers: dict[str, Any] = {}
    happened: Counter[str] = Counter()
    waiting = list(enumerate(requests))[::-1]
    unfinished: dict[str, float] = {}  # and the step after which each is given up
    steps = aborted = 0
    with driver.preemptions() as preempted:
        while waiting or unfinished:
            while waiting and len(unfinished) < UNFINISHED:
                number, request = waiting.pop()
                _begin(engine, f"r{number}", prompts[request["prompt"]], request)
                unfinished[f"r{number}"] = steps + (request.get("abort") or math.inf)
            for answer in engine.step():
                if answer.finished:
                    answers[answer.request_id] = _described(answer)
                    del unfinished[answer.request_id]
            steps += 1
            for name in [name for name, until in unfinished.items() if until <= steps]:
                engine.abort_request([name])
                del unfinished[name]
                aborted += 1
            if (what := happenings.get(str(steps))) is not None:
                happened[what[0]] += 1
                _HAPPENINGS[what[0]](driver, *what[1:])
    return {"answers": answers, "aborted": aborted, "preempted": len(preempted), "happened": dict(happened)}


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
            [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)]
            for one in answer.outputs
        ],
        "cached": answer.num_cached_tokens or 0,
    }


def _preempt(driver: Any) -> None:
    with contextlib.suppress(RuntimeError):  # blocks that are still being saved cannot be reset
        driver.scheduler.reset_prefix_cache(reset_running_requests=True)


_HAPPENINGS: dict[str, Any] = {
    "preempt": _preempt,
    "damage": lambda driver, *arguments: driver.damage_files(*arguments),
    "remove": lambda driver, *arguments: driver.remove_files(*arguments),
    "clear hot": lambda driver: driver.clear_hot(),
    "weights changed": lambda driver: driver.scheduler.connector.reset_cache(),
}
