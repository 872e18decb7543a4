"""Whole caches in one thread and in virtual time: see `docs/architecture.md`, "Simulation"."""
