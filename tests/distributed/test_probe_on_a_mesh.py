"""A probe of a model on a mesh is that of one process, and the updates around it do not notice."""

import pytest
import torch

from moe.distributed.mesh import MeshConfig, build_mesh
from moe.tracing.probe_file import read_probes
from moe.training.routing_probe import RoutingProbe, probe_values
from tests.distributed.ranks import run_ranks
from tests.distributed.stages import ROWS, Stage, batch, differing

MESHES = {"ep 2": {"ep": 2}, "dp_shard 2": {"dp_shard": 2}, "tp 2": {"tp": 2}}


class Batches:
    """What the probe reads: batches that no update sees."""

    batch_size = ROWS
    lengths = None
    fingerprint = ""

    def batch(self, step, rows):
        return {name: values[rows] for name, values in batch(100 + step).items()}


def stage_with_probes(folder, mesh):
    """Returns a stage after two updates with a probe before each and one behind, and its numbers."""
    stage = Stage("adafactor", mesh)
    probe = RoutingProbe(folder, stage.model, Batches(), 3, text="three batches", mesh=mesh)
    probe.begin(0)
    probe.record(0)
    stage.step(0)
    probe.record(1)
    stage.step(1)
    return stage, probe_values(probe.record(2).scores)


def on_a_rank(rank, num_ranks, folder):
    """Returns for each mesh what updates with and without probes differ in, and the numbers."""
    answers = {}
    for name, sizes in MESHES.items():
        mesh = build_mesh(MeshConfig(**sizes), "cpu")
        plain = Stage("adafactor", mesh)
        for number in range(2):
            plain.step(number)
        probed, values = stage_with_probes(folder / name, mesh)
        answers[name] = (differing(plain.content(), probed.content()), values)
    return answers


@pytest.mark.slow
def test_a_probe_over_two_ranks_equals_one_process_and_moves_nothing(tmp_path):
    answers = run_ranks(on_a_rank, 2, tmp_path, tmp_path)
    _, expected_values = stage_with_probes(tmp_path / "one", None)
    expected = read_probes(tmp_path / "one")
    for answer in answers:
        for name, (differences, values) in answer.items():
            assert differences == [], name
            assert values == pytest.approx(expected_values, rel=1e-9), name

    text = "text.safetensors"
    for name in MESHES:
        assert (tmp_path / name / text).read_bytes() == (tmp_path / "one" / text).read_bytes()
        for ours, theirs in zip(read_probes(tmp_path / name), expected, strict=True):
            assert ours.step == theirs.step
            for key, choices in theirs.choices.items():
                assert torch.equal(ours.choices[key], choices), (name, key)
