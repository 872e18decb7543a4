"""`tiercache bench`: ceilings of the machine and ours, interleaved in one run, because a shared machine drifts by 2x."""
