"""A document of 4,000 tokens, asked about five times, with transformers alone: no server, no engine but the model.

    python examples/transformers_chat.py [--tokens 4000] [--answer-tokens 24]

It uses the small model of `make demo`. The first question computes the document, the others load it, the last one in a new
cache from disk. Each is asked once more without the cache: the answers have to be the same, token by token.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from tiercache import Config, TierCache
from tiercache.demo.model import prepare_model
from tiercache.demo.server import quickest_dtype
from tiercache.integrations.transformers import Answer, Generator, ModelKv
from tiercache.signals import ended_by_signals

QUESTIONS = (
    "What is this text about?",
    "Name one statement of the language that it explains.",
    "Who should read it?",
    "Is it about Python 2 or Python 3?",
    "Give it a title.",
)
_GB = 2**30


class FirstToken:
    """A streamer that notes when the first token of the answer came. Called on the model's thread."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.ttft_s = 0.0
        self._calls = 0

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:  # the first call has the prompt
            self.ttft_s = time.perf_counter() - self.began

    def end(self) -> None: ...


@dataclass(frozen=True)
class Chat:
    tokenizer: Any
    document: str
    settings: GenerationConfig

    def ids(self, question: str) -> list[int]:
        messages = [{"role": "system", "content": self.document}, {"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    async def ask(self, generator: Generator, question: str, *, cached: bool = True) -> tuple[Answer, float]:
        """Return the answer, and the seconds to its first token."""
        streamer = FirstToken()
        answer = await generator.generate(self.ids(question), self.settings, streamer=streamer, cached=cached)
        return answer, streamer.ttft_s


def document_of(tokenizer: Any, tokens: int) -> str:
    """Return the beginning of the language reference that comes with Python."""
    ids = tokenizer("\n".join(topics[name] for name in sorted(topics))).input_ids[:tokens]
    return str(tokenizer.decode(ids))


async def chat_about(chat: Chat, kv: ModelKv, config: Config, table: Table) -> None:
    """Raise SystemExit if a cached answer differs from the computed one."""
    for questions in (QUESTIONS[:-1], QUESTIONS[-1:]):  # and a restart in between
        async with TierCache.open(config, kv.layout) as cache, Generator(cache, kv) as generator:
            for question in questions:
                answer, ttft_s = await chat.ask(generator, question)
                computed, cold_s = await chat.ask(generator, question, cached=False)
                if answer.ids != computed.ids:
                    raise SystemExit(f"wrong: the cached answer to {question!r} differs from the computed one")
                tiers = ", ".join(f"{tier} {tokens}" for tier, tokens in answer.hit_by_tier.items() if tokens)
                table.add_row(question, tiers or "-", f"{ttft_s:.2f}", f"{cold_s:.2f}", f"{cold_s / ttft_s:.1f}")


def main(
    tokens: Annotated[int, typer.Option(min=300, help="Length of the document.")] = 4000,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer.")] = 24,
) -> None:
    console = Console(highlight=False)
    console.print("preparing the model (20 s when it is done for the first time)")
    transformers_logging.disable_progress_bar()
    directory = prepare_model()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, quickest_dtype())).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    settings = GenerationConfig(max_new_tokens=answer_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    chat = Chat(tokenizer, document_of(tokenizer, tokens), settings)
    table = Table(title=f"{len(chat.ids(QUESTIONS[0]))} tokens of prompt; seconds to the first token")
    table.add_column("question")
    for column in ("tokens hit", "with the cache", "without", "ratio"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory(prefix="tiercache-chat-") as place:
        kv = ModelKv(model)
        hot_bytes = 2 * (tokens + 1024) * kv.layout.bytes_per_token
        config = Config.load(
            overrides={
                "max_local_cpu_size": round(max(0.25, hot_bytes / _GB), 3),
                "local_disk": str(Path(place) / "kv"),
                "max_local_disk_size": 2.0,
            },
            environ={},
        )
        asyncio.run(chat_about(chat, kv, config, table))
    console.print(table)
    console.print("Every answer is, token by token, the one that is computed without the cache.")


if __name__ == "__main__":
    with ended_by_signals():
        typer.run(main)
