"""The state of a request in vLLM: the chunks that vLLM asks for, and the answers. Pure, without vLLM.

vLLM asks for one chunk at a time, again in each step until all have an answer. Chunks that memory knows to be present
are answered at once. The others are looked up together, once per step and request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tiercache.integrations.vllm.hints import Wishes

Name = bytes
"""vLLM's name of a chunk: the hash of its tokens and all tokens before them, and its group."""
_GROUP_BYTES = 4


@dataclass
class TieredRequest:
    """Bound to the scheduler's thread. Holds a few bytes per chunk."""

    wishes: Wishes = field(default_factory=Wishes)
    ends: dict[Name, int] = field(default_factory=dict)
    """Ends of chunks in the prompt, for a request with hints."""
    waited_s: float = 0.0
    """Seconds waited for answers so far: one limit applies to all lookups of a request."""
    began: bool = False
    """True if the chunks of a session's request have become known and the session has not been told."""
    stale: bool = False
    """True if the KV was computed before the cache was reset, perhaps with other weights."""
    unasked: list[tuple[Name, int | None]] = field(default_factory=list, init=False)
    """Unknown chunks since the last `take_unasked`, each with its end in the prompt if known."""
    _answers: dict[Name, bool | None] = field(default_factory=dict, init=False)
    """True if a chunk is present; None while the lookup is in flight.

    An answer stays until the request ends, so that a chunk that cannot be loaded is not retried again and again.
    """

    @property
    def names(self) -> list[Name]:
        """The chunks of a request with hints, from the first to the last."""
        return sorted(self.ends, key=lambda name: self.ends[name])

    def look_up(self, name: Name, end_token: int | None, is_known: Callable[[Name], bool]) -> bool | None:
        """Return True if the chunk, which ends at `end_token` of the prompt, is present; None means ask again.

        `is_known` returns True if memory knows that a chunk is present. It must not wait.
        """
        if self.wishes.at_the_end:
            self.began = self.began or bool(self.wishes.session and not self.ends)
            self.ends[name] = end_token or 0
        if name in self._answers:
            return self._answers[name]
        if is_known(name):
            return True
        self._answers[name] = None
        self.unasked.append((name, end_token))
        return None

    def take_unasked(self) -> list[list[Name]]:
        """Return the unasked chunks as runs, and count them as asked.

        vLLM walks forward through the chunks of full attention, which form a run: after a missing chunk, the rest of
        the run is useless. It walks backward through the chunks of a window, which are runs of their own.
        """
        runs: list[list[Name]] = []
        before: int | None = None
        for name, end in self.unasked:
            forward = before is not None and end is not None and end > before
            if forward and runs[-1][-1][-_GROUP_BYTES:] == name[-_GROUP_BYTES:]:
                runs[-1].append(name)
            else:
                runs.append([name])
            before = end
        self.unasked = []
        return runs

    def answered(self, runs: Sequence[Sequence[Name]], found: Sequence[int], took_s: float) -> None:
        """Record how many of the first chunks of each run are present, and the time that the lookup took."""
        self.waited_s += took_s
        for run, present in zip(runs, found, strict=True):
            self._answers.update((name, position < present) for position, name in enumerate(run))

    def could_not_load(self, names: Iterable[Name]) -> None:
        """Count these chunks as misses for this request from now on."""
        self._answers.update(dict.fromkeys(names, False))

    def stores(self, ends: Mapping[Name, int]) -> None:
        """Record chunks that the request stores, with their ends in its prompt."""
        if self.wishes.at_the_end:
            self.ends.update(ends)

    def reset(self) -> None:
        """Mark the request as stale after a reset, since its KV may be older than the reset."""
        self.stale = True
        self.unasked = []
        self._answers = {}
