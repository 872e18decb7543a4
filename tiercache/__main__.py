"""Run `python -m tiercache`, which equals `tiercache`."""

from tiercache.cli import main

main()
