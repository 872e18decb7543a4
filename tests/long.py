"""Tests that take minutes each: `make long-test` runs them, CI does not."""

from __future__ import annotations

import os

import pytest

LONG = "LONG_TESTS" in os.environ
takes_minutes = pytest.mark.skipif(not LONG, reason="takes minutes: make long-test")
