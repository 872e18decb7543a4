"""Replay a trace for real, through a cache with memory and files, beside its simulation."""
