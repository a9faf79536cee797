"""Optimizers on parameters that are cut over four ranks in every way that the library cuts them.

The oracle is the same optimizer on whole parameters in one process. Each rank brings the elements
that it holds and where they stand in the whole, as it learned from a parameter of running numbers
that was cut alike.
"""

from functools import partial
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moe.optim import sharded_optimizer
from moe.optim.adafactor import Adafactor
from moe.optim.lamb import LAMB
from moe.optim.lars import LARS
from moe.optim.muon import Muon
from tests.distributed.ranks import run_ranks

NUM_RANKS = 4
NUM_STEPS = 4


class Case(NamedTuple):
    """A parameter and how it is cut: `cut` names the dim of an axis, None for replicas; FSDP takes
    the other axes.
    """

    axes: dict[str, int]
    shape: tuple[int, ...]
    cut: dict[str, int | None] = MappingProxyType({})
    fsdp_dim: int = 0
    batch_dims: int = 0


FSDP, HSDP = {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}
FSDP_TP, EP_TP, FSDP_EP = {"dp_shard": 2, "tp": 2}, {"ep": 2, "tp": 2}, {"dp_shard": 2, "ep": 2}
ALL_AXES = {"dp_replicate": 1, "dp_shard": 2, "ep": 2, "tp": 1}

CASES = {
    "on no mesh": Case({}, (5, 7)),
    "fsdp, factored": Case(FSDP, (5, 7)),
    "fsdp, two empty shards": Case(FSDP, (2, 3, 7)),
    "hsdp, factored": Case(HSDP, (5, 7)),
    "hsdp, vector": Case(HSDP, (3,)),
    "fsdp and tp in the rows": Case(FSDP_TP, (10, 7), {"tp": 0}),
    "fsdp and tp in the columns": Case(FSDP_TP, (5, 8), {"tp": 1}, fsdp_dim=1),
    "fsdp in the rows, tp in the columns": Case(FSDP_TP, (5, 8), {"tp": 1}),
    "fsdp in the columns, tp in the rows": Case(FSDP_TP, (5, 8), {"tp": 0}, fsdp_dim=1),
    "fsdp and tp, not factored": Case(FSDP_TP, (3, 8), {"tp": 1}),
    "fsdp and tp in a vector": Case(FSDP_TP, (7,), {"tp": 0}),
    "fsdp and replicas": Case(FSDP_TP, (5, 7), {"tp": None}),
    "fsdp and tp in F, packed": Case(FSDP_TP, (2, 12, 7), {"tp": 1}, fsdp_dim=1),
    "ep and tp": Case(EP_TP, (3, 2, 6, 7), {"ep": 0, "tp": 2}, batch_dims=1),
    "ep and tp, vectors": Case(EP_TP, (3, 7), {"ep": 0, "tp": None}, batch_dims=1),
    "ep and fsdp in the experts": Case(FSDP_EP, (6, 2, 5, 7), {"ep": 0}, batch_dims=1),
    "ep, fsdp in F": Case(FSDP_EP, (3, 2, 6, 7), {"ep": 0}, fsdp_dim=2, batch_dims=1),
    "ep, fsdp in the columns": Case(FSDP_EP, (3, 7, 6), {"ep": 0}, fsdp_dim=2, batch_dims=1),
    "ep, fsdp in the vectors": Case(FSDP_EP, (3, 6), {"ep": 0}, fsdp_dim=1, batch_dims=1),
    "all axes": Case(ALL_AXES, (3, 2, 6, 7), {"ep": 0, "tp": 2}, fsdp_dim=1, batch_dims=1),
}

# ---- one process ----


def whole(name, case, step, dtype):
    """Returns the weights (step -1) or the gradient of a step; some gradients are spikes, so that
    clipping acts.
    """
    seed = 1000 * sorted(CASES).index(name) + step + 1
    x = torch.randn(case.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * (30 if step % 3 == 2 else 1)).to(dtype)


def build_adafactor(parameters, cases):
    """Returns Adafactor in two groups, in which matrices are factored from 5 x 5 on."""
    groups = []
    for batch_dims in (0, 1):
        names = [name for name, case in cases.items() if case.batch_dims == batch_dims]
        members = [parameters[name] for name in names]
        groups.append({"params": members, "batch_dims": batch_dims})
    return Adafactor(groups, lr=0.1, min_dim_size_to_factor=5)


def build_with_ratios(kind, parameters, cases, **options):
    """Returns LARS, LAMB or Muon in two groups; every third parameter is a router."""
    groups = []
    for batch_dims in (0, 1):
        names = [name for name, case in cases.items() if case.batch_dims == batch_dims]
        kinds = ["router" if number % 3 == 2 else "weights" for number in range(len(names))]
        members = [parameters[name] for name in names]
        groups.append({"params": members, "batch_dims": batch_dims, "kinds": kinds})
    return kind(groups, lr=0.1, weight_decay=0.1, **options)


def build_adamw(parameters, cases):
    return torch.optim.AdamW([parameters[name] for name in cases], lr=0.1)


def steps_of_one_process(cases, dtype, num_steps=NUM_STEPS, build=build_adafactor):
    parameters = {
        name: torch.nn.Parameter(whole(name, case, -1, dtype)) for name, case in cases.items()
    }
    optimizer = build(parameters, cases)
    for step in range(num_steps):
        for name, case in cases.items():
            parameters[name].grad = whole(name, case, step, dtype)
        optimizer.step()
    return parameters


OTHERS = {
    "adamw": build_adamw,
    "lars": partial(build_with_ratios, LARS, trust_coefficient=0.5),
    "lamb": partial(build_with_ratios, LAMB),
    "muon": partial(build_with_ratios, Muon),
}


# ---- ranks ----


def cut_up(full, case, meshes):
    """Returns this rank's parameter: experts and tensor axes first, then FSDP, as the library does
    it.
    """
    if not case.axes:
        return torch.nn.Parameter(full)
    names, sizes = tuple(case.axes), tuple(case.axes.values())
    if (names, sizes) not in meshes:
        meshes[names, sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    mesh = meshes[names, sizes]
    if case.cut:
        placements = [Replicate() if dim is None else Shard(dim) for dim in case.cut.values()]
        full = distribute_tensor(full, mesh[tuple(case.cut)], placements)
    holder = torch.nn.ParameterDict({"parameter": torch.nn.Parameter(full)})
    if data_axes := tuple(name for name in names if name not in case.cut):
        fully_shard(holder, mesh=mesh[data_axes], shard_placement_fn=lambda _: Shard(case.fsdp_dim))
    return holder["parameter"]


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def like(parameter, tensor):
    """Returns a local tensor as a DTensor that is placed as the parameter."""
    if not isinstance(parameter, DTensor):
        return tensor
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class OnAMesh:
    """Parameters of some cases, and the places of this rank's elements in each."""

    def __init__(self, cases, dtype, meshes, build=build_adafactor):
        self.cases, self.dtype = cases, dtype
        self.parameters = {
            name: cut_up(whole(name, case, -1, dtype), case, meshes) for name, case in cases.items()
        }
        self.places = {}
        for name, case in cases.items():
            num_elements = self.parameters[name].numel()
            numbers = torch.arange(num_elements, dtype=torch.float64).view(case.shape)
            self.places[name] = local(cut_up(numbers, case, meshes).detach()).long()
        self.optimizer = build(self.parameters, cases)

    def take_steps(self, steps):
        for step in steps:
            for name, case in self.cases.items():
                grad = whole(name, case, step, self.dtype).flatten()[self.places[name]]
                self.parameters[name].grad = like(self.parameters[name], grad)
            self.optimizer.step()

    def elements(self):
        return {
            name: (self.places[name], local(p.detach()).clone())
            for name, p in self.parameters.items()
        }


def count_all_reduces(num_parameters, meshes, build=build_adafactor):
    """Returns how many exchanges one step takes on as many vectors and twice as many matrices."""
    vectors = {f"vector {i}": Case(FSDP, (3,)) for i in range(num_parameters)}
    matrices = {f"matrix {i}": Case(FSDP, (5, 7)) for i in range(2 * num_parameters)}
    cases = {**vectors, **matrices}
    parameters = {
        name: cut_up(torch.ones(case.shape), case, meshes) for name, case in cases.items()
    }
    optimizer = build(parameters, cases)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        optimizer.step()
    return all_reduce.call_count


def on_a_rank(rank, num_ranks):
    """Returns this rank's answers to all tests below; the small buckets hold one to three
    parameters.
    """
    answers, meshes = {}, {}
    run = OnAMesh(CASES, torch.float64, meshes)
    run.take_steps(range(NUM_STEPS))
    answers[torch.float64] = run.elements()

    with mock.patch.object(sharded_optimizer, "MAX_BUCKET_ELEMENTS", 30):
        run = OnAMesh(CASES, torch.float32, meshes)
        run.take_steps(range(NUM_STEPS))
        answers[torch.float32] = run.elements()

    answers["all-reduces"] = [count_all_reduces(num, meshes) for num in (1, 13)]
    lamb = OTHERS["lamb"]
    answers["all-reduces of lamb"] = [count_all_reduces(num, meshes, lamb) for num in (1, 13)]
    for name, build in OTHERS.items():
        run = OnAMesh(CASES, torch.float64, meshes, build)
        run.take_steps(range(NUM_STEPS))
        answers[name] = run.elements()
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_ranks(on_a_rank, NUM_RANKS, tmp_path_factory.mktemp("ranks"))


def assert_same(parts, expected, tolerance):
    """Compares the elements of all ranks with whole parameters, relative to the largest entry of
    each.
    """
    for name, parameter in expected.items():
        flat, seen = parameter.detach().flatten(), set()
        for part in parts:
            places, elements = part[name]
            atol = tolerance * float(flat.abs().max())
            assert torch.allclose(elements, flat[places], rtol=0, atol=atol), name
            seen.update(places.flatten().tolist())
        assert len(seen) == flat.numel(), name


@pytest.mark.slow
def test_parameters_that_are_cut_take_the_steps_of_whole_ones(answers):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        parameters = steps_of_one_process(CASES, dtype)
        assert_same([answer[dtype] for answer in answers], parameters, tolerance)


@pytest.mark.slow
def test_replicas_stay_equal_to_the_last_bit(answers):
    for name, case in CASES.items():
        held = torch.full(case.shape, torch.nan).flatten()
        for answer in answers:
            places, elements = answer[torch.float32][name]
            known = ~held[places].isnan()
            assert torch.equal(held[places][known], elements[known]), name
            held[places] = elements


@pytest.mark.slow
def test_the_number_of_all_reduces_does_not_grow_with_the_number_of_parameters(answers):
    assert [answer["all-reduces"] for answer in answers] == [[3, 3]] * NUM_RANKS
    assert [answer["all-reduces of lamb"] for answer in answers] == [[1, 1]] * NUM_RANKS


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_take_the_same_steps_on_several_meshes_at_once(answers, name):
    parameters = steps_of_one_process(CASES, torch.float64, build=OTHERS[name])
    assert_same([answer[name] for answer in answers], parameters, 1e-12)
