"""`python -m tiercache`, as `tiercache`."""

from tiercache.cli import main

main()
