"""Servers of other makers, started for tests and benchmarks, and the processes that they run in."""
