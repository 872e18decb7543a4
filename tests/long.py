"""Tests that take minutes each: `make long-test` runs them, CI does not."""

from __future__ import annotations

import os

import pytest

takes_minutes = pytest.mark.skipif("TIERCACHE_LONG_TESTS" not in os.environ, reason="takes minutes: make long-test")
