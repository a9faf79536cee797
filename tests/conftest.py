"""Settings of all tests: time never decides one, since the machine may be busy, and the processes of
slow ones are forked from one server.
"""

import gc

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.processes import fork_context

gc.disable()  # until all tests are collected: they stay
settings.register_profile(
    "patient",
    deadline=None,
    derandomize=True,  # a test fails because of the commit, not of the draw
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


@pytest.fixture(scope="module")
def one_thread():
    """Has torch compute on one thread: a dispatch mode sees no other, and many make small work slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Starts the server before a program under test starts its own."""
    if item.get_closest_marker("slow"):
        fork_context()


def pytest_collection_finish() -> None:
    """Takes what was imported and collected out of the collector's sight.

    Five thousand tests and the libraries that they import are millions of objects. Every full collection would
    go through them, in a second instead of a hundredth, and transformers' Trainer asks for several.
    """
    _freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Does the same with what a file of tests leaves behind."""
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
