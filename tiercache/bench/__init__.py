"""`tiercache bench`: ceilings of the machine and tiercache, interleaved in one run, since a shared machine drifts by 2x."""
