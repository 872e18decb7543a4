"""The emulator's daemon, until its stdin ends or it gets SIGTERM: `python -m tests.hf3fs_emulator SETTINGS`, as JSON."""

import json
import logging
import sys

from tests.hf3fs_emulator.daemon.run import Daemon, Settings

logging.basicConfig(level=logging.WARNING)
Daemon(Settings(**json.loads(sys.argv[1]))).serve()
