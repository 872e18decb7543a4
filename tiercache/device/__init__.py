"""Accelerator memory: streams and events awaited in the event loop, paged copies, a registered buffer pool."""
