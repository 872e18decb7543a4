"""README.md and the Makefile, cut into what they show: blocks by language, shell commands, inline commands, targets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
KINDS = frozenset({"sh", "python", "yaml", "json", "text"})
"""The labels that a block may have: of each kind, something runs or compares what is shown."""
_BLOCK = re.compile(rf"^```({'|'.join(sorted(KINDS))})\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OTHER_BLOCK = re.compile(r"^.*(?:```|~~~|<pre|<code).*$|^(?: {4}|\t).*\S.*$", re.MULTILINE)
"""Other fences, a fence in a list, lines that are code by their indent, HTML."""
_INLINE = re.compile(r"`([^`]+)`")
_COMMAND = re.compile(
    r"(?:\w+=\S* )*(?:\S*/)?(?:make|tiercache|python[\d.]*|pip[\d.]*|uv|curl|wget|docker|podman|sudo|git|bash|sh|vllm) \S.*"
    r"|(?:\w+=\S* )*\.{1,2}/\S.*"
)
"""Inline code that a reader would type."""
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


def read_me() -> str:
    return (REPOSITORY / "README.md").read_text()


def blocks(text: str | None = None) -> list[Block]:
    text = read_me() if text is None else text
    found = []
    for match in _BLOCK.finditer(text):
        headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", text[: match.start()]), re.MULTILINE)
        found.append(Block(match[1], match[2], headings[-1]))
    return found


def other_blocks(text: str) -> list[str]:
    """The first lines of blocks in a form that nothing here reads: whatever they show would be run by nothing."""
    return _OTHER_BLOCK.findall(_BLOCK.sub("", text))


def shell_commands(text: str | None = None) -> list[str]:
    """Of all shell blocks, in their order."""
    return [command for block in blocks(text) if block.language == "sh" for command in block.commands()]


def inline_commands(text: str | None = None) -> list[str]:
    """Commands in the prose, each once."""
    prose = _BLOCK.sub("", read_me() if text is None else text)
    found = (" ".join(match.split()) for match in _INLINE.findall(prose))
    return list(dict.fromkeys(command for command in found if _COMMAND.fullmatch(command)))


def targets() -> list[str]:
    (names,) = _TARGETS.findall((REPOSITORY / "Makefile").read_text())
    return list(names.split())
