"""Other programs tell a running cache what is coming: a Unix socket that the cache opens, and HTTP in front of it."""
