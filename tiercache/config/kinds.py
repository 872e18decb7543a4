"""Kinds of values: parse one value and check its range, independent of its key.

Each kind turns a value from YAML, JSON or an environment variable into the value of a field, and raises ValueError that
says what it expected. Parsing a parsed value gives the same value.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

_PARTS_OF_UNIT = {"GB": 2**30, "MiB": 2**20, "seconds": 10**9, "milliseconds": 10**6}
_MOST_PARTS = 2**63
"""Upper bound, since the system counts bytes and nanoseconds in signed 64-bit integers."""
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class Kind(ABC):
    """The kind of a key's value."""

    @property
    @abstractmethod
    def expected(self) -> str:
        """A noun phrase for the accepted values."""

    @abstractmethod
    def parse(self, raw: Any) -> Any:
        """Return the value that `raw` means. Raises ValueError if it means none."""

    def refusal(self, more: str = "") -> ValueError:
        return ValueError(f"expected {self.expected}{more}")


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    """true or false, in any spelling that YAML or LMCache's environment accepts."""

    @property
    def expected(self) -> str:
        return "true or false"

    def parse(self, raw: Any) -> bool:
        if isinstance(raw, (bool, str)) or (isinstance(raw, int) and raw in (0, 1)):
            word = str(raw).strip().lower()
            if word in _TRUE:
                return True
            if word in _FALSE:
                return False
        raise self.refusal()


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number in a closed range."""

    low: int | None = None
    high: int | None = None
    unit: str = ""

    @property
    def expected(self) -> str:
        noun = _noun("a whole number", self.unit)
        if self.high is not None:
            return f"{noun} in {self.low} .. {self.high}"
        return noun if self.low is None else f"{noun} >= {self.low}"

    def parse(self, raw: Any) -> int:
        number = _number(raw, self.expected, self.unit)
        if not number.is_integer():
            raise self.refusal()
        # Convert through float only if the text is not an integer already: 2**53 and more must stay exact.
        value = raw if isinstance(raw, int) else int(raw) if _is_integer_text(raw) else int(number)
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise self.refusal()
        return value


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A finite number of at least 0, or more than 0 with `above`, and at most `high`."""

    above: bool = False
    unit: str = ""
    high: float | None = None

    @property
    def expected(self) -> str:
        least = f"{_noun('a number', self.unit)} {'>' if self.above else '>='} 0"
        return least if self.high is None else f"{least} and <= {self.high:g}"

    def parse(self, raw: Any) -> float:
        value = _number(raw, self.expected, self.unit)
        if value < 0 or (self.above and value == 0) or (self.high is not None and value > self.high):
            raise self.refusal()
        return value


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Text on one line, stripped of spaces around it."""

    meaning: str = "text"
    may_be_empty: bool = True

    @property
    def expected(self) -> str:
        return self.meaning if self.may_be_empty else f"{self.meaning}, not empty"

    def parse(self, raw: Any) -> str:
        if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
            raise self.refusal()
        text = str(raw).strip()
        if not text and not self.may_be_empty:
            raise self.refusal()
        # An environment variable may hold bytes that are not UTF-8.
        if "\0" in text or (not text.isascii() and text.encode(errors="ignore").decode() != text):
            raise self.refusal(", in UTF-8 and without NUL characters")
        return text


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """A word from a fixed set, in any case."""

    words: tuple[str, ...]
    why: str = ""
    """The reason why other words are refused, if it is not obvious."""

    @property
    def expected(self) -> str:
        return " or ".join(self.words) if len(self.words) < 3 else "one of " + ", ".join(self.words)

    def parse(self, raw: Any) -> str:
        for word in self.words:
            if isinstance(raw, str) and raw.strip().lower() == word.lower():
                return word
        raise self.refusal(f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class Words(Kind):
    """A list, as a YAML list or separated by commas. `paths` drops `file://` and expands `~`."""

    paths: bool = False

    @property
    def expected(self) -> str:
        return "a path, or a list of paths" if self.paths else "a word, or a list of words"

    def parse(self, raw: Any) -> tuple[str, ...]:
        parts = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
            raise self.refusal()
        words = [part.strip() for part in parts]
        return tuple(_path(word) if self.paths else word for word in words if word)


@dataclass(frozen=True, slots=True)
class Optional(Kind):
    """Another kind, or None for an empty text."""

    kind: Kind

    @property
    def expected(self) -> str:
        return self.kind.expected

    def parse(self, raw: Any) -> Any:
        return None if raw is None or (isinstance(raw, str) and not raw.strip()) else self.kind.parse(raw)


def is_text(kind: Kind) -> bool:
    return isinstance(kind.kind if isinstance(kind, Optional) else kind, Text)


def _path(text: str) -> str:
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    elif re.match(r"[a-z0-9+-]+://", text):
        raise ValueError("expected a path or file:// (other schemes are for remote_url)")
    if "\0" in text:
        raise ValueError("expected a path without NUL characters")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError("expected a path that a file can have") from None
    return os.path.expanduser(text)


def _number(raw: Any, expected: str, unit: str) -> float:
    if isinstance(raw, (int, float, str)) and not isinstance(raw, bool):
        try:
            value = float(raw)
        except (ValueError, OverflowError):
            value = math.nan
        if math.isfinite(value):
            if abs(value) >= (most := _MOST_PARTS / _PARTS_OF_UNIT.get(unit, 1)):
                raise ValueError(f"expected {expected} and below {most:.3g}")
            return value
    raise ValueError(f"expected {expected}")


def _is_integer_text(raw: Any) -> bool:
    return isinstance(raw, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", raw) is not None


def _noun(noun: str, unit: str) -> str:
    return f"{noun} of {unit}" if unit else noun
