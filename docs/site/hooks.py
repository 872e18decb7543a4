"""Pages are written for GitHub; this makes them pages of MkDocs. The first one is README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "README.md"
_FIRST_ITEM = re.compile(r"[-*] |1\. ")
_NO_TEXT = re.compile(r"\s|[-*|#>] |\d+\. |$")
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?!docs/|\w+:|#)[^)]*\)")
"""Links from README.md to files that are not part of the site."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_path == "index.md":
        markdown = _OUTSIDE.sub(r"\1", README.read_text()).replace("](docs/", "](")
    out = re.escape("../" * (page.file.src_path.count("/") + 1))  # a page leaves docs/ by one `../` for each folder
    markdown = re.sub(rf"\[([^\]]*)\]\({out}[^)]*\)", r"\1", markdown)
    lines: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        in_text = bool(lines) and not fenced and not _NO_TEXT.match(lines[-1])
        if in_text and _FIRST_ITEM.match(line):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
