"""What a step has freed, the next one gets without a page of the kernel."""

import subprocess
import sys

import pytest

from moe.kernels.host_memory import keep_freed_memory

PROGRAM = """
import resource
import runpy
import torch
# The file alone: the package imports transformers.
keep_freed_memory = runpy.run_path("moe/kernels/host_memory.py")["keep_freed_memory"]

is_kept = keep_freed_memory()
torch.set_num_threads(1)

def faults_of_steps(*sizes):
    def step():
        blocks = [torch.ones(size * 2**18) for size in sizes]  # MiB

    # Until the largest blocks of all steps have their place.
    for _ in range(3):
        step()
    counts = []
    for _ in range(3):  # on a busy machine the kernel may take pages back meanwhile
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            step()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts)

print(is_kept, faults_of_steps(1, 50, 3, 40), faults_of_steps(300))
"""
PAGES = 5 * 94 * 256  # of five steps with the small blocks


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_the_pages_of_one_step_are_those_of_the_next_for_blocks_of_any_size():
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    is_kept, faults, faults_of_large = done.stdout.split()
    assert is_kept == "True"
    assert int(faults) < PAGES / 10
    assert int(faults_of_large) < 300 * 256 / 10


def test_what_the_user_set_is_kept(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
