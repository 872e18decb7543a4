"""README.md and the Makefile, cut into what they show: blocks by language, shell commands, inline commands, targets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")
_PROGRAMS = re.compile(r"(?:\.venv/bin/)?(make|tiercache|python|pip) \S")
_TARGETS = re.compile(r"^\.PHONY: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    section: str
    """The heading above it."""

    @property
    def name(self) -> str:
        return f"{self.language or 'text'} in {self.section}"

    def commands(self) -> list[str]:
        """Of a shell block: one entry a command, continued lines joined, comments left out."""
        joined = re.sub(r" *\\\n *", " ", self.text)
        lines = (re.sub(r"\s+#\s.*", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks() -> list[Block]:
    text = (REPOSITORY / "README.md").read_text()
    found = []
    for match in _BLOCK.finditer(text):
        headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", text[: match.start()]), re.MULTILINE)
        found.append(Block(match[1], match[2], headings[-1]))
    return found


def shell_commands() -> list[str]:
    """Of all shell blocks, in their order."""
    return [command for block in blocks() if block.language in ("sh", "bash") for command in block.commands()]


def inline_commands() -> list[str]:
    """Commands in the prose, each once."""
    prose = _BLOCK.sub("", (REPOSITORY / "README.md").read_text())
    found = (" ".join(match.split()) for match in _INLINE.findall(prose))
    return list(dict.fromkeys(command for command in found if _PROGRAMS.match(command)))


def targets() -> list[str]:
    (names,) = _TARGETS.findall((REPOSITORY / "Makefile").read_text())
    return list(names.split())
