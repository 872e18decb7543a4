"""`python -m tiercache.bench.gpu`."""

import sys

from tiercache.bench.gpu.command import main

sys.exit(main(sys.argv[1:]))
