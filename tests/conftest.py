"""Settings of all tests: time never decides one, since the machine may be busy, and the processes of
slow ones are forked from one server.
"""

import pytest
from hypothesis import HealthCheck, settings

from tests.processes import fork_context

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Starts the server before a program under test starts its own."""
    if item.get_closest_marker("slow"):
        fork_context()
