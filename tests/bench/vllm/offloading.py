"""vLLM's own offloading with its `fs` tier and with ours, in one table: what each makes of bad luck, and how fast it is.

    python -m tests.bench.vllm.offloading --directory /mnt/nvme

Both have the same engine, CPU tier, copies and prompts, and nothing but a directory. Answers are those of a real model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.vllm.installed import require_installed
from tests.bench.vllm.measure import text_of
from tests.bench.vllm.offloading_engines import BLOCK_TOKENS, Answer, Engine, engine, import_vllm, tier_settings
from tiercache.demo.model import prepare_model
from tiercache.errors import TierCacheError
from tiercache.signals import ended_by_signals

SIDES = ("fs", "tiercache")
_PROMPT_TOKENS = 12 * BLOCK_TOKENS + 9
_HIT_TOKENS = _PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
_CAP_BYTES = 80 << 20
_MORE_PROMPTS = 6
_CHUNK_BYTES = 256 << 10
"""What is smaller is no chunk of the demo's model."""
_HIGH_EXPONENT_BIT = 0x40
"""In the last byte of a float32: the number is another one by far."""

Prompt = Sequence[int]


@dataclass
class Side:
    name: str
    directory: Path
    rows: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    right: dict[int, Answer] = field(default_factory=dict)
    """By the number of its prompt, the answer that was computed."""

    def chunks(self) -> list[Path]:
        found = (path for path in self.directory.rglob("*") if path.is_file() and ".tmp" not in path.name)
        return sorted(path for path in found if path.stat().st_size >= _CHUNK_BYTES)

    def occupied_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.directory.rglob("*") if path.is_file())

    def took(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)


class Bench:
    def __init__(self, text: Sequence[int], place: Path, pairs: int) -> None:
        self.text = text
        self.pairs = pairs
        self.sides = [Side(name, place / name) for name in SIDES]

    def prompt(self, number: int) -> Prompt:
        """Prompts that share nothing."""
        start = number * _PROMPT_TOKENS
        return self.text[start : start + _PROMPT_TOKENS]

    def ask(self, side: Side, engine: Engine, numbers: Sequence[int]) -> str:
        """What came of prompts that were answered before."""
        return outcome(
            [engine.ask(self.prompt(number)) for number in numbers], [side.right[number] for number in numbers]
        )

    def compute(self, side: Side, engine: Engine, number: int) -> None:
        side.right[number] = engine.ask(self.prompt(number))
        assert side.right[number].hit_tokens == 0

    def measure(self, engines: Sequence[Engine]) -> None:
        """In turn: from nothing, from the tier, from vLLM's CPU tier."""
        for pair in range(self.pairs):
            for side, at in list(zip(self.sides, engines, strict=True))[:: 1 if pair % 2 else -1]:
                prompt = self.prompt(100 + pair)
                side.took("computed", at.ask(prompt, 1).seconds)
                side.took("stored", at.settle())
                at.forget_memory()
                side.took("loaded from the tier", at.ask(prompt, 1).seconds)
                side.took("loaded from vLLM's CPU tier", at.ask(prompt, 1).seconds)
                at.settle()

    def damage(self, side: Side, at: Engine) -> None:
        """Of two prompts, one chunk of one."""
        for what, harm in (("a flipped bit", flip), ("a truncated file", truncate)):
            before = set(side.chunks())
            numbers = (0, 1) if harm is flip else (2, 3)
            for number in numbers:
                self.compute(side, at, number)
            at.settle()
            at.forget_memory()
            harm(next(path for path in side.chunks() if path not in before))
            side.rows[what] = self.ask(side, at, numbers)
            at.settle()

    def fill(self, side: Side, at: Engine) -> list[int]:
        """Past the cap; the prompts that came last."""
        numbers = list(range(10, 10 + _MORE_PROMPTS))
        for number in numbers:
            self.compute(side, at, number)
            at.settle()
        mib = side.occupied_bytes() / 2**20
        cap = f"{_CAP_BYTES >> 20} allowed" if side.name != "fs" else "it has no cap"
        side.rows["running past the cap"] = f"{mib:.0f} MiB used, {cap}"
        return numbers[-2:]

    def kill(self, side: Side, at: Engine) -> int:
        """Right after an answer, while its chunks are being written; the prompt."""
        number = 30
        self.compute(side, at, number)
        at.kill()
        return number


def outcome(answers: Sequence[Answer], right: Sequence[Answer]) -> str:
    """Wrong answers, and tokens that hit."""
    wrong = sum(not is_right(*pair) for pair in zip(answers, right, strict=True))
    hits = sum(answer.hit_tokens for answer in answers)
    return f"{wrong} of {len(answers)} wrong, {hits} of {len(answers) * _HIT_TOKENS} tokens hit"


def is_right(answer: Answer, right: Answer) -> bool:
    """As right as vLLM's own recompute is, which splits the prefill in another way."""
    return answer.tokens[:4] == right.tokens[:4] and all(
        abs(ours - theirs) < 0.15 for ours, theirs in zip(answer.logprobs[:4], right.logprobs[:4], strict=True)
    )


def flip(path: Path) -> None:
    """One bit, in the middle of a chunk."""
    with path.open("r+b") as file:
        place = path.stat().st_size // 8 * 4 + 3
        (byte,) = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte ^ _HIGH_EXPONENT_BIT]), place)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def linked(model: Path, directory: Path) -> Path:
    """A directory with the files of `model`, which may be replaced there; returns it."""
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    return directory


def train_again(model: Path) -> None:
    """Other weights where `model`'s were."""
    from safetensors.torch import load_file, save_file

    place = model / "model.safetensors"
    weights = load_file(place)
    changed = {name: 1.5 * tensor if ".v_proj." in name else tensor for name, tensor in weights.items()}
    place.unlink()
    save_file(changed, place, metadata={"format": "pt"})


def compare(model: Path, place: Path, pairs: int) -> list[Side]:
    """All of the table. Raises what an engine raises."""
    text, model = text_of(model), linked(model, place / "model")
    import_vllm()
    bench = Bench(text, place, pairs)
    settings = {side.name: tier_settings(side.name, side.directory, _CAP_BYTES) for side in bench.sides}
    last: list[int] = []
    with ExitStack() as stack:
        engines = [stack.enter_context(engine(model, settings[side.name])) for side in bench.sides]
        bench.measure(engines)
        for side, at in zip(bench.sides, engines, strict=True):
            bench.damage(side, at)
            last = [*bench.fill(side, at), bench.kill(side, at)]
            print(f"{side.name}: {side.rows}", file=sys.stderr, flush=True)
    for side in bench.sides:
        with engine(model, settings[side.name]) as at, engine(model, settings[side.name]) as other:
            side.rows["a restart, after kill -9"] = bench.ask(side, at, last[:2])
            side.rows["what was being written at kill -9"] = bench.ask(side, at, last[2:])
            bench.compute(side, at, 40)
            at.settle()
            side.rows["another engine, on the same directory"] = bench.ask(side, other, [40])
        print(f"{side.name}: {side.rows}", file=sys.stderr, flush=True)
    # Elsewhere: torch starts threads for it, whose locks no fork could use any more.
    training = multiprocessing.get_context("fork").Process(target=train_again, args=(model,))
    training.start()
    training.join()
    empty = Side(SIDES[0], place / "empty")
    with engine(model, tier_settings(empty.name, empty.directory, _CAP_BYTES)) as at:
        for number in last[:2]:
            bench.compute(empty, at, number)
    for side in bench.sides:
        side.right |= empty.right
        with engine(model, settings[side.name]) as at:
            side.rows["other weights at the same path"] = bench.ask(side, at, last[:2])
    return bench.sides


def table(sides: Sequence[Side]) -> str:
    names = [f"`{side.name}`, vLLM's own" if side.name == "fs" else side.name for side in sides]
    lines = [f"| | {' | '.join(names)} |", f"|---{'|---' * len(sides)}|"]
    lines += [f"| {what} | {' | '.join(side.rows[what] for side in sides)} |" for what in sides[0].rows]
    for what in sides[0].seconds:
        medians = [statistics.median(side.seconds[what]) for side in sides]
        spread = [f"{1e3 * min(side.seconds[what]):.0f} .. {1e3 * max(side.seconds[what]):.0f}" for side in sides]
        shown = [f"{1e3 * median:.0f} ms ({range_})" for median, range_ in zip(medians, spread, strict=True)]
        lines.append(f"| {what} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    try:
        require_installed()
    except TierCacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    where = {"prefix": "tiercache-offloading-", "dir": arguments.directory}
    with ended_by_signals(), tempfile.TemporaryDirectory(**where, ignore_cleanup_errors=True) as place:
        print(table(compare(prepare_model(), Path(place), arguments.pairs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
