"""Find stored chunks that begin with the blocks which a request needs next. Pure: no vLLM, no asyncio.

A request loads whole chunks as far as it shares them with earlier requests. Where it differs from them in the middle of a
chunk, the first blocks of an earlier request's chunk are those that it needs. Block names are chained over the whole prefix,
so equal names mean equal KV.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from tiercache.integrations.vllm.planning import Sibling

_KEPT_BYTES = 16
"""Bytes that are kept of each block's name. The names are cryptographic hashes, of which so many bytes are distinct."""
_MOST_TRIED = 8


class Siblings:
    """The names of the blocks of many chunks, ordered so that chunks which begin alike are neighbours."""

    def __init__(self, blocks_per_chunk: int, most: int, *, tails: bool = False) -> None:
        """`most` is the number of chunks that are kept: those that were added last. `tails`: requests store tails too."""
        self._step = blocks_per_chunk
        self._most = most
        self._tails = tails
        self._sorted: list[tuple[bytes, bytes]] = []
        """The kept bytes of the names of each chunk's blocks, and the chunk's name. A tail comes before the chunk that it
        became.
        """
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        """These bytes, by the name of the chunk. The chunks that were added last come last."""

    def add(self, names: Sequence[bytes]) -> None:
        """Add the chunks of a request; `names` has one name per block."""
        last = len(names) if self._tails else len(names) - len(names) % self._step
        for start in range(0, last, self._step):
            end = min(start + self._step, last)
            name = names[end - 1]
            if name in self._blocks:
                self._blocks.move_to_end(name)
                continue
            blocks = self._blocks[name] = _joined(names[start:end])
            insort(self._sorted, (blocks, name))
        while len(self._sorted) > self._most:
            name, oldest = self._blocks.popitem(last=False)
            del self._sorted[bisect_left(self._sorted, (oldest, name))]

    def like(self, names: Sequence[bytes]) -> Iterator[tuple[int, Sibling]]:
        """Yield chunks that begin with the blocks of these names: how many, at least 1, and the chunk.

        Those with the most blocks come first, and only a few are tried.
        """
        wanted = _joined(names[: self._step])
        right = bisect_left(self._sorted, (wanted,))
        left = right - 1
        for _ in range(_MOST_TRIED):
            before = _blocks_in_common(self._sorted[left][0], wanted) if left >= 0 else 0
            after = _blocks_in_common(self._sorted[right][0], wanted) if right < len(self._sorted) else 0
            if not before and not after:
                return
            if before > after:
                yield before, self._sibling(left)
                left -= 1
            else:
                yield after, self._sibling(right)
                right += 1

    def _sibling(self, position: int) -> Sibling:
        blocks, name = self._sorted[position]
        return Sibling(name, len(blocks) // _KEPT_BYTES)


def _joined(names: Sequence[bytes]) -> bytes:
    return b"".join(name[:_KEPT_BYTES] for name in names)


def _blocks_in_common(one: bytes, other: bytes) -> int:
    """Return how many first blocks have equal names. Names are chained, so blocks after these differ."""
    starts = range(0, len(one), _KEPT_BYTES)
    return sum(one[start : start + _KEPT_BYTES] == other[start : start + _KEPT_BYTES] for start in starts)
