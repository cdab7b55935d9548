"""Fixtures for unit tests of several packages."""

from functools import partial

import pytest
from loops import Go, run_checked


@pytest.fixture(params=["uvloop", "asyncio"])
def go(request: pytest.FixtureRequest) -> Go:
    """Runs a test's coroutine on each kind of loop, and finds what it leaves behind."""
    return partial(run_checked, request.param)
