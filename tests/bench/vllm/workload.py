"""What clients ask, by seed. Pure: token ids of a text go in, requests come out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

BLOCK_TOKENS = 128
ENGINE_BLOCKS = 44
"""Of the small engine cache: about a quarter of what the documents need."""
FITTING_DOCUMENTS = 5
"""As many prompts and answers about documents as that holds: nine blocks each, on average."""
LONGEST_TOKENS = 2048
CLIENTS = 8
ANSWER_TOKENS = 16
DOCUMENT_TOKENS = (400, 1600)
HANG_UPS = 0.3
_QUESTION_TOKENS = 20
_MARK_TOKENS = 8
"""At the beginning, by chance: no two prompts of different seeds share a block."""
_HIT_DOCUMENTS = 3
"""Of eight blocks each: with what eight clients ask beside them, they fit into the small engine cache."""
_WAITING_PROMPT_TOKENS = 160


@dataclass(frozen=True)
class Ask:
    """One request: token ids, and how many tokens are to be answered."""

    prompt: tuple[int, ...]
    answer_tokens: int = ANSWER_TOKENS
    hang_up_after: int | None = None
    """The client goes after so many tokens of the answer; 0: while its prompt waits or is computed. None: it stays."""


@dataclass(frozen=True)
class Amounts:
    """How much of each workload. `FULL` measures; `QUICK` only shows that everything works."""

    new_prompts: int
    engine_hits: int
    documents: int
    requests: int
    hot_gb: float
    document_pairs: int
    """At most so many pairs of what takes longest: all of it takes half an hour on two slow cores as it is."""
    alone_pairs: int
    """Of those, with vLLM alone: its engine cache is too small, so it takes far longer than the two that are compared."""
    hang_up_pairs: int
    fault_documents: int
    fault_requests: int
    fault_hot_gb: float
    waiting: int
    waiting_ends: int
    """So many more than `waiting` are sent, and are answered before the rest is taken back."""


FULL = Amounts(12, 60, 24, 60, 0.25, 5, 1, 1, 8, 20, 0.12, 64, 24)
QUICK = Amounts(3, 6, 6, 8, 0.12, 1, 1, 1, 4, 5, 0.12, 64, 4)


def new_prompts(text: Sequence[int], seed: int, count: int) -> list[Ask]:
    """No two share a block with each other, nor with those of another seed."""
    chance = random.Random(f"new {seed}")
    return [Ask(_document(text, chance, chance.randint(*DOCUMENT_TOKENS))) for _ in range(count)]


def engine_hits(text: Sequence[int], seed: int, count: int) -> tuple[list[Ask], list[Ask]]:
    """What fills the engine's own prefix cache, and what then finds all whole blocks of its prompts in there."""
    chance = random.Random(f"hits {seed}")
    known = [_document(text, chance, 8 * BLOCK_TOKENS) for _ in range(_HIT_DOCUMENTS)]
    return [Ask(prompt, 1) for prompt in known], [
        Ask(known[number % len(known)] + _piece(text, chance, _QUESTION_TOKENS)) for number in range(count)
    ]


def questions(text: Sequence[int], seed: int, documents: int, count: int) -> list[Ask]:
    """Questions about documents in an order by chance: all documents are asked about equally often, or once more."""
    chance = random.Random(f"documents {seed}")
    known = [_document(text, chance, chance.randint(*DOCUMENT_TOKENS)) for _ in range(documents)]
    order: list[int] = []
    while len(order) < count:
        order += chance.sample(range(documents), min(documents, count - len(order)))
    chance.shuffle(order)
    return [Ask(known[number] + _piece(text, chance, _QUESTION_TOKENS)) for number in order]


def with_hang_ups(asks: Sequence[Ask], seed: int, part: float = HANG_UPS) -> list[Ask]:
    """The same, of which `part` of the clients go in the middle: a third of them before the first token."""
    chance = random.Random(f"hang up {seed}")
    found = list(asks)
    for order, number in enumerate(chance.sample(range(len(found)), round(part * len(found)))):
        after = 0 if order % 3 == 0 else chance.randrange(1, found[number].answer_tokens)
        found[number] = replace(found[number], hang_up_after=after)
    return found


def crowd(text: Sequence[int], seed: int, count: int) -> list[Ask]:
    """Short prompts, sent all at once: more than an engine runs, so that most of them wait."""
    chance = random.Random(f"crowd {seed}")
    return [Ask(_document(text, chance, _WAITING_PROMPT_TOKENS), 2 * ANSWER_TOKENS) for _ in range(count)]


def _document(text: Sequence[int], chance: random.Random, tokens: int) -> tuple[int, ...]:
    return (*chance.choices(text, k=_MARK_TOKENS), *_piece(text, chance, tokens - _MARK_TOKENS))


def _piece(text: Sequence[int], chance: random.Random, tokens: int) -> tuple[int, ...]:
    begin = chance.randrange(len(text) - tokens)
    return tuple(text[begin : begin + tokens])
