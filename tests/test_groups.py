"""That tests which share what is dear to make run in one process, as `conftest.py` says."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="all tests run in one process")
def test_groups_reach_who_hands_out_the_tests(request: pytest.FixtureRequest) -> None:
    """pytest-xdist reads them from the end of a test's name; pytest 9.2 does not let it write there."""
    assert request.node.nodeid.endswith("@tests/test_groups.py")
