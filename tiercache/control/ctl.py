"""Run `tiercache ctl`: change running caches through their control sockets."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercache.control.client import Fleet
from tiercache.control.messages import Attach, Command, ControlError, Detach, Reconfigure, Reload


def ctl_command(sockets: list[Path], action: str, what: Sequence[str]) -> int:
    """Send one command to all caches and print what changed.

    Returns 1 if a cache refuses it or does not answer, 2 if none can be reached or the command line is wrong.
    """
    try:
        command = _command(action, what)
        fleet = Fleet(sockets)
        answers = asyncio.run(fleet.ask_each(command))
    except (ValueError, ControlError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    good = [answer for answer in answers.values() if not isinstance(answer, ControlError)]
    failed = [f"{path}: {answer}" for path, answer in answers.items() if isinstance(answer, ControlError)]
    failed += fleet.missing()
    changed = dict.fromkeys(line for answer in good for line in answer.get("changed", []))
    for line in changed or ([] if failed else ["done" if what else "nothing differs"]):
        print(line)
    for problem in failed:
        print(f"error: {problem}", file=sys.stderr)
    reached = [answer for answer in answers.values() if getattr(answer, "kind", "") != "unreachable"]
    return 2 if not reached else 1 if failed else 0


def _command(action: str, what: Sequence[str]) -> Command:
    match action:
        case "set" if what and all(key and equals for key, equals, _ in (part.partition("=") for part in what)):
            changes: dict[str, Any] = {}
            for key, _, value in (part.partition("=") for part in what):
                if key in changes:
                    raise ValueError(f"{key} is given twice")
                changes[key] = value
            return Reconfigure(changes=changes)
        case "reload" if not what:
            return Reload()
        case "detach" if len(what) == 1:
            return Detach(tier=what[0])
        case "attach" if len(what) == 1:
            return Attach(tier=what[0])
    # The words are not repeated: one of them may be a password.
    words = f"{len(what)} word{'s' * (len(what) != 1)}"
    raise ValueError(
        f"expected set KEY=VALUE ..., reload, detach TIER or attach TIER, found {action!r} with {words} after it"
    )
