"""Divide the KV of a model's layers into chunks, and find the chunks that a hit needs. Pure.

Layers of full attention and layers of a window use separate chunks, so that a hit loads only what the window still
sees. All parts have about the same size, since every chunk takes a slot of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SEES_EVERYTHING = 0


@dataclass(frozen=True)
class LayerKv:
    """The KV of one layer: per token `heads` keys of `key_size` numbers and as many values of `value_size`."""

    heads: int
    key_size: int
    value_size: int
    window_tokens: int = SEES_EVERYTHING
    """A token sees itself and the `window_tokens - 1` tokens before it."""

    def bytes_per_token(self, item_bytes: int) -> int:
        return self.heads * (self.key_size + self.value_size) * item_bytes


@dataclass(frozen=True)
class Part:
    """Layers with the same window whose KV shares chunks."""

    layers: tuple[int, ...]
    bytes_per_token: int
    window_tokens: int

    def first_chunk(self, chunks: int, chunk_tokens: int) -> int:
        """Return the first chunk that these layers need to continue after `chunks` whole chunks."""
        if self.window_tokens == SEES_EVERYTHING:
            return 0
        return max(0, chunks * chunk_tokens - (self.window_tokens - 1)) // chunk_tokens


def parts_of(layers: Sequence[LayerKv], item_bytes: int) -> list[Part]:
    """Return the parts, longest window first; within a window, layers in their order."""
    windows = sorted({layer.window_tokens for layer in layers}, key=lambda window: (window != SEES_EVERYTHING, -window))
    sizes = [layer.bytes_per_token(item_bytes) for layer in layers]
    by_window = [[number for number, layer in enumerate(layers) if layer.window_tokens == one] for one in windows]
    most = max(*sizes, min(sum(sizes[number] for number in numbers) for numbers in by_window))
    parts = []
    for window, numbers in zip(windows, by_window, strict=True):
        for run in _runs(numbers, sizes, most):
            parts.append(Part(tuple(run), sum(sizes[number] for number in run), window))
    return parts


def _runs(numbers: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield `numbers` in order, cut before a run exceeds `most` bytes a token."""
    run: list[int] = []
    for number in numbers:
        if run and sum(sizes[one] for one in run) + sizes[number] > most:
            yield run
            run = []
        run.append(number)
    yield run


def needed(parts: Sequence[Part], chunks: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Return (chunk, number of the part) of every chunk that a hit of `chunks` chunks loads, in the order of the tokens."""
    firsts = [part.first_chunk(chunks, chunk_tokens) for part in parts]
    return [(chunk, number) for chunk in range(chunks) for number, first in enumerate(firsts) if chunk >= first]
