"""Whether processes still work, told from those that wait."""

import subprocess
import sys
import time

import pytest

from tests import progress
from tests.progress import Progress, cpu_seconds


def has_stopped_within(seconds, *pids):
    work = Progress(pids)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)
        if work.has_stopped():
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "stops"), [("while True: pass", False), ("import time; time.sleep(60)", True)]
)
def test_a_process_that_waits_has_stopped_and_one_that_computes_has_not(
    program, stops, monkeypatch
):
    monkeypatch.setattr(progress, "WINDOW", 1.0)
    monkeypatch.setattr(progress, "LEAST", 0.05)  # the machine may be busy
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            time.sleep(0.5)  # Python starts
            assert has_stopped_within(2, process.pid) == stops
        finally:
            process.kill()


def test_a_process_that_is_gone_computes_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert cpu_seconds(process.pid) == 0
