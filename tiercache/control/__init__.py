"""Control a running cache from other programs: a Unix socket opened by the cache, and HTTP in front of it."""
