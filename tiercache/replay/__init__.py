"""Replay traces of requests through the cache's own policies on a simulated clock."""
