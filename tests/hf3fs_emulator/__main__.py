"""`python -m tests.hf3fs_emulator --mount DIR`: the emulator's daemon, until it gets SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from tests.hf3fs_emulator.daemon.run import Daemon, Settings
from tests.hf3fs_emulator.emulator import why_no_fuse


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hf3fs_emulator", description=__doc__)
    parser.add_argument("--mount", type=Path, metavar="DIR", required=True, help="where to mount")
    parser.add_argument("--backing", type=Path, help="directory that holds the files (default: DIR.files)")
    parser.add_argument("--socket", type=Path, help="Unix socket for fault injection")
    parser.add_argument(
        "--no-negative-io-depth", action="store_true", help="refuse rings of io_depth < 0, as newer daemons do"
    )
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if reason := why_no_fuse():
        parser.error(reason)
    backing = given.backing or given.mount.with_name(f"{given.mount.name}.files")
    for directory in (given.mount, backing):
        directory.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING)
    settings = Settings(
        mount=given.mount.resolve(),
        backing=backing.resolve(),
        socket=given.socket,
        negative_io_depth=not given.no_negative_io_depth,
        ready_descriptor=given.ready_fd,
        until_stdin_closes=given.until_stdin_closes,
    )
    Daemon(settings).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
