"""Build the long prompt, and measure the time to the first token of a streamed request at the client."""

from __future__ import annotations

import hashlib
import json
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from tiercache.demo.server import MODEL_NAME, Server, open_url

PROMPT_TOKENS = 6043
"""47 blocks of 128 tokens and a rest that has to be computed in any case."""
ANSWER_TOKENS = 32
_QUESTION = "\n\nThat was a part of a reference manual. In two sentences: what is it about?"
_ASK_S = 300.0


@dataclass(frozen=True)
class Answer:
    request_id: str
    ttft_s: float
    prompt_tokens: int
    hit_tokens: int
    text: str

    @property
    def text_sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def long_message(model: Path, prompt_tokens: int = PROMPT_TOKENS) -> str:
    """Return prose from Python's language reference, cut so that the whole prompt has about `prompt_tokens` tokens.

    Counts with the model's own tokenizer, and cuts between words so that the prompt is not longer.
    """
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    words = "\n".join(topics[name] for name in sorted(topics)).split(" ")

    def message(count: int) -> str:
        return " ".join(words[:count]) + _QUESTION

    def length(count: int) -> int:
        chat = [{"role": "user", "content": message(count)}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    low, high = 0, 8 * prompt_tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length(middle) <= prompt_tokens else (low, middle)
    return message(low)


def ask(server: Server, message: str, answer_tokens: int = ANSWER_TOKENS) -> Answer:
    """Send one streamed chat request, with greedy decoding. TTFT is the time from sending to the first piece of text.

    Raises `ServerFailed` if the server refuses, dies or sends nothing.
    """
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": message}],
        "max_tokens": answer_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    first: float | None = None
    text, request_id = "", ""
    usage: dict[str, Any] = {}
    try:
        with open_url(request, timeout=_ASK_S) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise server.failed(f"vLLM answered with an error: {event['error']}")
                request_id = event["id"]
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    piece = choice["delta"].get("content")
                    if piece:
                        first = first or time.perf_counter()
                        text += piece
    except HTTPError as error:
        raise server.failed(f"vLLM refused: {error}: {error.read().decode(errors='replace')}") from error
    except (OSError, HTTPException) as error:
        raise server.failed(f"vLLM stopped answering: {error}") from error
    if first is None or not usage:
        raise server.failed("vLLM answered without text or without usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(request_id, first - began, usage["prompt_tokens"], details.get("cached_tokens") or 0, text)
