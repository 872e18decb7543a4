"""The asynchronous shell: it moves bytes and waits. What to do is decided in `core`."""
