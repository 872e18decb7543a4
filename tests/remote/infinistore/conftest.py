"""Fixtures of the InfiniStore tests."""

from tests.remote.arena import payloads_in_the_arena  # noqa: F401 - a fixture
