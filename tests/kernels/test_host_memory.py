"""What a step has freed, the next one gets without a page of the kernel."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
import resource
import torch
from moe.kernels.host_memory import keep_freed_memory

is_kept = keep_freed_memory()
torch.set_num_threads(1)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    largest = int(os.environ.get("MIB", 40))
    blocks = [torch.ones(size * 2**18) for size in (1, 50, 3, largest)]  # MiB

# Until the largest blocks of all steps have their place.
for _ in range(5):
    step()
before = faults()
for _ in range(5):
    step()
print(is_kept, faults() - before)
"""
PAGES = 5 * 94 * 256  # of five steps


def run(**variables):
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ".", **variables}
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    is_kept, faults = done.stdout.split()
    return is_kept == "True", int(faults)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_the_pages_of_one_step_are_those_of_the_next():
    is_kept, faults = run()
    assert is_kept
    assert faults < PAGES / 10


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_blocks_of_any_size_are_kept():
    is_kept, faults = run(MIB="1200")
    assert is_kept
    assert faults < 1200 * 256 / 10


@pytest.mark.slow
def test_what_the_user_set_is_kept():
    is_kept, faults = run(MALLOC_TRIM_THRESHOLD_="131072")
    assert not is_kept
    assert faults > PAGES / 4
