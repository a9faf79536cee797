"""What a rank holds of a tensor, and where a file has it, against shards of running numbers."""

import itertools

import pytest
import torch

from moe.distributed.mesh import MeshConfig
from moe.distributed.sharding import (
    MeshCoordinate,
    contiguous_runs,
    shard_over_ep_tp,
    shard_over_fsdp,
    shard_slices,
)
from moe.models.parallelize import model_layouts
from tests.models.tiny import tiny_model

FIELDS = {"d_model": 13, "d_kv": 1, "d_ff": 22, "num_heads": 4, "num_experts": 6, "vocab_size": 53}
MESHES = {
    "tp 2, dp_shard 4": (1, 4, 1, 2),
    "ep 3, dp_shard 2": (2, 2, 3, 1),
    "all axes": (2, 2, 2, 2),
}


def coordinates(config):
    """Returns the coordinate of every rank of one replica."""
    axes = (range(config.ep), range(config.tp), range(config.dp_shard))
    return [
        MeshCoordinate(ep, tp, shard * config.ep + ep, shard)
        for ep, tp, shard in itertools.product(*axes)
    ]


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_slices_are_what_is_sharded_for_a_rank(sizes):
    config, model = MeshConfig(*sizes), tiny_model(**FIELDS)
    layouts = model_layouts(model, model.config, config)
    for (name, layout), coordinate in itertools.product(layouts.items(), coordinates(config)):
        numbers = torch.arange(model.get_parameter(name).numel()).view(layout.shape)
        on_tp = shard_over_ep_tp(numbers, layout, config, coordinate)
        on_all_axes = shard_over_fsdp(on_tp, layout, coordinate)
        unsharded = layout._replace(num_shards=1)
        for of, expected in ((layout, on_all_axes), (unsharded, on_tp)):
            slices = tuple(slice(*ends) for ends in shard_slices(of, config, coordinate))
            assert torch.equal(numbers[slices], expected), (name, coordinate)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (3, 2, 5, 7)])
def test_runs_are_the_elements_of_a_shard_in_their_order(shape):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    generator = torch.Generator().manual_seed(len(shape))
    for _ in range(30):
        places = [torch.randint(size + 1, (2,), generator=generator) for size in shape]
        ends = tuple(tuple(sorted(place.tolist())) for place in places)
        expected = numbers[tuple(slice(*pair) for pair in ends)].flatten().tolist()
        elements = []
        for start, length in contiguous_runs(ends, shape):
            elements += range(start, start + length)
        assert elements == expected


def test_rows_that_are_whole_are_one_run():
    assert list(contiguous_runs(((1, 3), (0, 5), (0, 7)), (4, 5, 7))) == [(35, 70)]
    assert list(contiguous_runs(((0, 4), (0, 5), (0, 7)), (4, 5, 7))) == [(0, 140)]
    assert list(contiguous_runs(((1, 3), (2, 4), (0, 7)), (4, 5, 7))) == [(49, 14), (84, 14)]
