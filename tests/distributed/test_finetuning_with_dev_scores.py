"""A mixture with dev scores on two ranks: every mesh ends, and says what one process says of the
same saved models.

Oracles: the losses of one process; the saved best and last models, scored in one process.
"""

import json

import pytest

from moe.checkpoint.best_model import best_and_last
from moe.commands import finetune
from moe.distributed.launch import World
from moe.training.loop import train
from stmoe_eval.answers.data_ranks import SINGLE_PROCESS
from stmoe_eval.dev_scores import read_tasks
from stmoe_eval.task_readers import read_mixture
from tests.distributed.ranks import run_ranks
from tests.training.test_finetune_mixture import RECIPE, eval_lines, inputs  # noqa: F401  a fixture
from tests.training.tiny_tasks import registered

MESHES = {"ep 2": ["--mesh.ep", "2"], "tp 2": ["--mesh.tp", "2"]}
SAME_NUMBERS = {
    "model.dropout_rate": 0,
    "model.expert_dropout_rate": 0,
    "model.group_size": 48,
    "model.router_options.second_expert_policy": "all",
    "training.micro_batch_size": 2,
}


def one_run(recipe, out, rank=0, num_ranks=1, mesh=()):
    """Does what the command does inside `launch`, and returns the losses."""
    with registered():
        same_numbers = [f"--{name}={value}" for name, value in SAME_NUMBERS.items()]
        words = ["--config", str(recipe), "--out", str(out), *same_numbers, *mesh]
        parsed, arguments = finetune.finetune_command().parse(words)
        data = read_mixture(parsed.mixture)
        world = World(rank, num_ranks, rank, "cpu")
        train(finetune.build_run(parsed, arguments.pretrained, data, out, world))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["train/ce_loss"] for line in lines if "train/ce_loss" in line]


def on_two_ranks(rank, num_ranks, recipe, out):
    return {
        name: one_run(recipe, out / name, rank, num_ranks, mesh) for name, mesh in MESHES.items()
    }


@pytest.mark.slow
def test_a_mixture_on_two_ranks_trains_and_scores_as_in_one_process(inputs, tmp_path):  # noqa: F811
    alone = one_run(inputs["recipe"], tmp_path / "alone")
    for found in run_ranks(on_two_ranks, 2, tmp_path, inputs["recipe"], tmp_path):
        assert found == {name: pytest.approx(alone, rel=1e-4) for name in MESHES}
    with registered():
        scores = read_tasks(RECIPE["mixture"]["tasks"]).scores(None, SINGLE_PROCESS)
        for name in MESHES:
            run = tmp_path / name
            best, last = best_and_last(run)
            assert [line["eval/mean"] for line in eval_lines(run)][-1] == last["mean"]
            for folder, said in (("best/model", best), ("model", last)):
                again = scores(run / folder, tmp_path / "again" / name / folder)
                assert {"step": said["step"], **again} == pytest.approx(said)
