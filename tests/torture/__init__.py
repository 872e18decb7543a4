"""Tests of whole caches: `simulation`, on simulated clocks and devices, and `campaign`, with true processes and files."""
