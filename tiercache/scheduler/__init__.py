"""Asynchronous execution: move bytes and wait. `core` makes the decisions."""
