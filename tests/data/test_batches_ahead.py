"""Batches made ahead: the same ones as without, from processes that end with their reader."""

import os
import signal
from contextlib import closing

import numpy as np
import pytest
import torch

from moe.data.batches_ahead import batches_ahead, default_workers
from moe.data.pipeline import ALL_ROWS, SpanCorruptionSource
from moe.data.tokenizer import SpecialIds

IDS = SpecialIds(pad=0, eos=1, first_sentinel=230, num_sentinels=20)
STEPS = range(3, 10)


@pytest.fixture
def source():
    tokens = np.random.default_rng(0).integers(2, 200, 1_009).astype(np.int32)
    return SpanCorruptionSource(tokens, IDS, inputs_length=29, batch_size=5, seed=0)


class WithProcess:
    """A source whose batches tell the process that made them."""

    batch_size, lengths, fingerprint = 1, None, "x"

    def batch(self, step, rows=ALL_ROWS):
        return {"process": torch.tensor([os.getpid(), step])}


@pytest.mark.parametrize(("workers", "rows"), [(0, ALL_ROWS), (1, slice(2, 4)), (2, ALL_ROWS)])
def test_the_batches_are_those_of_the_source_whoever_makes_them(source, workers, rows):
    if workers > len(os.sched_getaffinity(0)):
        pytest.skip("this machine has fewer cores")

    made = list(batches_ahead(source, rows, STEPS, workers=workers))

    assert len(made) == len(STEPS)
    for step, batch in zip(STEPS, made, strict=True):
        expected = source.batch(step, rows)
        assert batch.keys() == expected.keys()
        for name, tensor in batch.items():
            assert torch.equal(tensor, expected[name])


def test_workers_are_other_processes_that_leave_ctrl_c_alone_and_end_when_the_reader_closes():
    with closing(batches_ahead(WithProcess(), ALL_ROWS, range(10**6), workers=1)) as batches:
        worker, step = next(batches)["process"].tolist()
        assert worker != os.getpid()
        assert step == 0

        os.kill(worker, signal.SIGINT)
        steps = [next(batches)["process"][1].item() for _ in range(7)]
        assert steps == list(range(1, 8))

    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_making_batches_ahead_takes_nothing_from_torchs_randomness(source):
    torch.manual_seed(0)
    expected = torch.rand(1)

    torch.manual_seed(0)
    list(batches_ahead(source, ALL_ROWS, range(1), workers=1))
    assert torch.equal(torch.rand(1), expected)


def test_a_rank_has_a_worker_for_each_four_of_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))

    workers = []
    for ranks in (1, 2, 4, 8):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        workers.append(default_workers())
    assert workers == [4, 2, 1, 0]
