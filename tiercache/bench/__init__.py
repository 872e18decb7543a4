"""Run `tiercache bench`: measure ceilings and tiercache in turn in one run, since a shared machine drifts by 2x."""
