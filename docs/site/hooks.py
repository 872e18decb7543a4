"""Pages are written for GitHub, where a list may follow a line of text; for MkDocs an empty line has to be between them."""

from __future__ import annotations

import re
from typing import Any

_FIRST_ITEM = re.compile(r"[-*] |1\. ")
_NO_TEXT = re.compile(r"\s|[-*|#>] |\d+\. |$")


def on_page_markdown(markdown: str, **_: Any) -> str:
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
