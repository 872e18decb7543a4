"""README.md, the guides and the Makefile, cut into what they show: blocks by language, commands, targets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
REFERENCE = frozenset({"CHANGELOG.md", "docs/architecture.md", "docs/configuration.md"})
"""Pages that show nothing to type: what has changed, how the cache works, and a table that is made from the code."""
KINDS = frozenset({"sh", "python", "yaml", "json", "text"})
"""The labels that a block may have: of each kind, something runs or compares what is shown."""
_BLOCK = re.compile(rf"^```({'|'.join(sorted(KINDS))})\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OTHER_BLOCK = re.compile(r"^.*(?:```|~~~|<pre|<code).*$|^(?: {4}|\t).*\S.*$", re.MULTILINE)
"""Other fences, a fence in a list, lines that are code by their indent, HTML."""
_INLINE = re.compile(r"`([^`]+)`")
_COMMAND = re.compile(
    r"(?:\w+=\S* )*(?:\S*/)?"
    r"(?:make|tiercache|python[\d.]*|pip[\d.]*|uv|curl|wget|docker|podman|kubectl|sudo|git|bash|sh|vllm) \S.*"
    r"|(?:\w+=\S* )*\.{1,2}/\S.*"
)
"""Inline code that a reader would type."""
_TARGETS = re.compile(r"^\.PHONY: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    page: str
    section: str
    """The heading above it."""

    @property
    def name(self) -> str:
        return f"{self.language} in {self.page}, {self.section}"

    def commands(self) -> list[str]:
        """Return the commands of a shell block: continued lines joined, comments left out."""
        joined = re.sub(r" *\\\n *", " ", self.text)
        lines = (re.sub(r"\s+#\s.*", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def pages() -> list[str]:
    """Return README.md and all pages that users and contributors read, without those of `REFERENCE`."""
    found = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]
    names = [path.relative_to(REPOSITORY).as_posix() for path in found]
    return sorted((name for name in names if name not in REFERENCE), key=lambda name: name != "README.md")


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text()


def blocks(page: str = "README.md", text: str | None = None) -> list[Block]:
    text = text_of(page) if text is None else text
    found = []
    for match in _BLOCK.finditer(text):
        headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", text[: match.start()]), re.MULTILINE)
        found.append(Block(match[1], match[2], page, headings[-1]))
    return found


def all_blocks(*languages: str) -> list[Block]:
    """Return the blocks of these languages on all pages."""
    return [block for page in pages() for block in blocks(page) if block.language in languages]


def block_of(page: str, section: str, language: str) -> Block:
    """Return the only block of a language in a section."""
    (found,) = [block for block in blocks(page) if (block.section, block.language) == (section, language)]
    return found


def other_blocks(text: str) -> list[str]:
    """Return the first lines of blocks in a form that nothing here reads, so that nothing would run what they show."""
    return _OTHER_BLOCK.findall(_BLOCK.sub("", text))


def shell_commands(text: str) -> list[str]:
    """Return the commands of all shell blocks, in their order."""
    return [command for block in blocks(text=text) if block.language == "sh" for command in block.commands()]


def inline_commands(text: str) -> list[str]:
    """Return the commands in the prose, each once."""
    prose = _BLOCK.sub("", text)
    found = (" ".join(match.split()) for match in _INLINE.findall(prose))
    return list(dict.fromkeys(command for command in found if _COMMAND.fullmatch(command)))


def shown(text: str) -> list[str]:
    """Return all commands that a page shows, each once."""
    return list(dict.fromkeys([*shell_commands(text), *inline_commands(text)]))


def all_shown() -> list[str]:
    return list(dict.fromkeys(command for page in pages() for command in shown(text_of(page))))


def targets() -> list[str]:
    (names,) = _TARGETS.findall((REPOSITORY / "Makefile").read_text())
    return list(names.split())
