"""Decisions: pure, synchronous, without I/O. Nothing here imports asyncio, torch or another part of tiercache."""
