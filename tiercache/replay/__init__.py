"""Traces of requests, replayed through the cache's own policies on a simulated clock."""
