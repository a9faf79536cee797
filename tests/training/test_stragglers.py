"""A rank that holds the others up is named, and nobody else."""

import contextlib
import io
import json
import time

import pytest
import torch

from moe.data.pipeline import PairSource
from moe.data.tokenizer import train_tokenizer
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models.parallelize import shard_model
from moe.training.build import BuiltModel
from moe.training.loop import Run, train
from moe.training.metrics import MetricsWriter
from moe.training.recipe import OptimRecipe, Recipe, TrainingRecipe
from moe.training.stragglers import RankSeconds, StragglerWatch, metric_values, straggler_text
from tests.distributed.ranks import run_ranks
from tests.models.tiny import tiny_model
from tests.training.tiny_run import write_texts

SLOW_RANK, SLEEP = 1, 0.25


def interval(*work, total=10.0):
    waits = [total - seconds for seconds in work]
    return RankSeconds({"work": list(work), "dp_shard": waits})


def test_a_rank_is_named_when_it_was_slowest_three_times_running():
    watch = StragglerWatch()
    slow = interval(5.0, 7.0, 5.1, 4.9)

    assert [watch.observe(slow) for _ in range(4)] == [None, None, 1, 1]
    assert not watch.is_news
    assert watch.observe(interval(5.0, 5.0, 5.1, 4.9)) is None
    assert [watch.observe(slow) for _ in range(3)] == [None, None, 1]
    assert watch.is_news


def test_slow_ranks_that_take_turns_are_not_named():
    watch = StragglerWatch()
    turns = [interval(7.0, 5.0, 5.0), interval(5.0, 7.0, 5.0), interval(5.0, 5.0, 7.0)]

    assert [watch.observe(turn) for turn in turns * 3] == [None] * 9


@pytest.mark.parametrize(
    "seconds",
    [
        interval(5.0, 5.9, 5.0, 5.0),  # less than a tenth of the interval
        interval(3.0, 7.0, 5.0, 4.0, 6.0),  # no more than the others differ
        interval(5.0, 5.0),
    ],
)
def test_what_may_be_noise_is_not_named(seconds):
    assert not seconds.has_straggler


def test_the_warning_says_who_and_how_much():
    seconds = interval(5.0, 7.0, 5.2)

    assert straggler_text(seconds, 30).startswith(
        "step 30: rank 1 was the slowest 3 times running. It worked 7 s where the median of the "
        "others is 5.1 s of 10 s; they wait for it, most of all on dp_shard."
    )
    assert metric_values(seconds, 1) == {
        "ranks/slowest": 1.0,
        "ranks/slowest_work_seconds": 7.0,
        "ranks/median_work_seconds": 5.1,
        "ranks/straggler": 1.0,
    }


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_goes_on_with_the_seconds_of_its_ranks(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        for step in (1, 2, 3):
            writer.write_ranks(step, {"work": [0.1, step / 3]})
    with MetricsWriter(tmp_path, 2) as writer:
        writer.write_ranks(3, {"work": [0.5, 0.25]})

    assert read_lines(tmp_path / "rank_seconds.jsonl") == [
        {"step": 1, "work": [0.1, 0.333333]},
        {"step": 2, "work": [0.1, 0.666667]},
        {"step": 3, "work": [0.5, 0.25]},
    ]


class Sleeping:
    """A source that sleeps on one rank while it makes a batch."""

    batch_size, fingerprint = 4, "x"

    def __init__(self, source, seconds):
        self.source, self.seconds = source, seconds

    def batch(self, step, rows):
        time.sleep(self.seconds)
        return self.source.batch(step, rows)


def with_a_slow_rank(rank, num_ranks, folder):
    """Returns what a run of two ranks warns of."""
    texts = [file.read_text() for file in sorted((folder / "texts").iterdir())]
    tokenizer = train_tokenizer(texts, 230, folder / f"tokenizer-{rank}")
    pairs = [(text[:20], text[20:30]) for text in texts]
    source = PairSource(pairs, tokenizer, inputs_length=13, targets_length=7, batch_size=4, seed=0)
    config = MeshConfig(dp_shard=num_ranks)
    recipe = Recipe(
        optim=OptimRecipe(schedule="constant", lr=0.01, warmup_steps=0),
        training=TrainingRecipe(steps=8, batch_size=4, log_every=2, checkpoint_every=99),
        mesh=config,
    )

    mesh = build_mesh(config, "cpu")
    model = tiny_model(vocab_size=230, group_size=13).train()
    layouts = shard_model(model, mesh)
    sleeping = Sleeping(source, SLEEP if rank == SLOW_RANK else 0.0)
    run = Run(folder / "run", recipe, BuiltModel(model, layouts, mesh), tokenizer, sleeping, None)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        train(run)
    return said.getvalue()


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_in_the_log_and_in_the_metrics(tmp_path):
    write_texts(tmp_path / "texts", 8)
    said = run_ranks(with_a_slow_rank, 2, tmp_path, tmp_path)

    assert f"rank {SLOW_RANK} was the slowest 3 times running" in said[0]
    assert "on dp_shard" in said[0]
    run = tmp_path / "run"
    lines = read_lines(run / "metrics.jsonl")
    assert {line["ranks/straggler"] for line in lines if "ranks/straggler" in line} == {SLOW_RANK}

    # Ranks end their steps together: work and waiting of each add up to the same.
    intervals = read_lines(run / "rank_seconds.jsonl")
    assert [entry["step"] for entry in intervals] == [2, 4, 6, 8]
    for entry in intervals:
        columns = [column for name, column in entry.items() if name != "step"]
        totals = torch.tensor(columns).sum(dim=0)
        torch.testing.assert_close(totals[0], totals[1], rtol=0.3, atol=0.1)
