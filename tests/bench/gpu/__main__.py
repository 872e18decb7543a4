"""`python -m tests.bench.gpu`."""

import importlib.util
import sys

NEEDED = ("aiofiles", "msgspec", "numpy", "rich", "torch", "xxhash", "yaml")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(
        f"{sys.executable} lacks {', '.join(missing)}. Choose another with make gpu-check GPU_PYTHON=.venv/bin/python "
        "(after make setup), or install them: pip install aiofiles msgspec numpy rich torch xxhash pyyaml"
    )

from tests.bench.gpu.command import main  # noqa: E402 - only once its imports are known to be there
from tiercache.signals import ended_by_signals  # noqa: E402

with ended_by_signals():
    sys.exit(main(sys.argv[1:]))
