"""A plan says what a run on 4 ranks allocates and sends; the run is counted, see counting.py."""

import math
from dataclasses import dataclass, field

import pytest
import torch

from moe.distributed.mesh import MeshConfig, build_mesh
from moe.models.parallelize import shard_model
from moe.models.pretrained import enable_activation_checkpointing
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from moe.planning.activations import activations
from moe.planning.plan import make_plan
from moe.planning.workload import Workload
from moe.sparse.routers.hash_by_token import hash_expert
from moe.training.recipe import OptimRecipe, PretrainRecipe, TrainingRecipe
from tests.distributed.ranks import run_ranks
from tests.models.tiny import tiny_model
from tests.planning.counting import SavedBytes, SentBytes, local_bytes, planned_bytes
from tests.training.one_step import train_step

ROWS, LENGTH, TARGETS = 16, 16, 8
FIELDS = {
    "d_model": 137,
    "d_kv": 33,
    "d_ff": 144,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "num_experts": 8,
    "group_size": 16,
    "vocab_size": 211,
}
BY_HASH = {"router": "hash", "router_options": {}}
BY_HASH |= {"num_selected_experts": 1, "capacity_factor": None}


@dataclass(frozen=True)
class Case:
    """A run: sizes of its mesh, fields of its model, and the update."""

    mesh: tuple[int, ...]
    fields: dict = field(default_factory=dict)
    micro: int | None = None
    checkpointed: bool = False
    bfloat16: bool = False
    optimizer: str = "adafactor"
    options: dict = field(default_factory=dict)


STATIC = {"dispatch": "static"}
UNSTACKED = {**STATIC, "sparse_dense_stacking": False}
SHARED = {**STATIC, "num_shared_experts": 1, "expert_bias": "multiplicative"}
SEQUENCES = {"group_size": 64, "convention": "switch", "expert_capacity": 3}
TIED = {"feed_forward_proj": "relu", "tie_word_embeddings": True}
EXACT = {
    "dp_shard x ep, ragged": Case((1, 2, 2, 1), BY_HASH, micro=2, checkpointed=True),
    "dp_shard x ep, bfloat16": Case((1, 2, 2, 1), SHARED, checkpointed=True, bfloat16=True),
    "dp_replicate x ep, AdamW": Case((2, 1, 2, 1), STATIC, micro=2, optimizer="adamw"),
    "ep x tp, ragged": Case((1, 1, 2, 2), BY_HASH, micro=4, checkpointed=True),
    "ep x tp, dropout": Case((1, 1, 2, 2), {**STATIC, "dropout_rate": 0.1}, checkpointed=True),
    "ep x tp, LARS": Case((1, 1, 2, 2), SHARED, optimizer="lars", options={"skip": ["biases"]}),
    "ep x tp, Muon": Case((1, 1, 2, 2), SHARED | UNSTACKED, optimizer="muon"),
    "ep, groups of one sequence": Case((1, 1, 4, 1), {**STATIC, **SEQUENCES}, micro=2),
    "ep in two nodes, ragged": Case((1, 1, 4, 1, 2), BY_HASH),
    "tp, ReLU, tied head": Case((1, 1, 1, 4), {**TIED, **STATIC}),
    "balance over all": Case((1, 2, 2, 1), {**STATIC, "balance_scope": "global"}, micro=2),
}
DROPPING = {"ep x tp, dropping": Case((1, 1, 2, 2), checkpointed=True)}


def even_ids(num_rows, length, generator):
    """Returns ids <int64>[B, L] of which router `hash` gives every expert equally many; the first
    of a row is 0.
    """
    experts = hash_expert(torch.arange(FIELDS["vocab_size"]), FIELDS["num_experts"], 0).tolist()
    chosen = [experts.index(expert) for expert in range(FIELDS["num_experts"])]
    others = torch.tensor([0] + [token for token in chosen if token != 0])
    ids = others.repeat(num_rows, length // FIELDS["num_experts"])
    order = [torch.randperm(length - 1, generator=generator) for _ in range(num_rows)]
    order = torch.nn.functional.pad(1 + torch.stack(order), (1, 0))  # the first stays
    return ids.gather(1, order)


def batch():
    """Returns rows without padding; the decoder reads the labels shifted by one, after a 0."""
    generator = torch.Generator().manual_seed(0)
    decoder = even_ids(ROWS, TARGETS, generator)
    return {"input_ids": even_ids(ROWS, LENGTH, generator), "labels": decoder.roll(-1, dims=1)}


def prepare(case):
    """Returns a model in training mode, its recipe and its workload."""
    model = tiny_model(**{**FIELDS, **case.fields}).train()
    if case.checkpointed:
        enable_activation_checkpointing(model, {"use_reentrant": False})
    precision = "bfloat16" if case.bfloat16 else "float32"
    shared = {"micro_batch_size": case.micro, "precision": precision}
    recipe = PretrainRecipe(
        optim=OptimRecipe(lr=0.1, warmup_steps=1, max_grad_norm=0.5),
        training=TrainingRecipe(steps=9, batch_size=ROWS, **shared),
    )
    shared |= {"optimizer": case.optimizer, "optimizer_options": case.options}
    shared["activation_checkpointing"] = case.checkpointed
    return model, recipe, Workload(ROWS, LENGTH, TARGETS, **shared)


def count_run(case):
    """Returns what is planned and what is counted on this rank: sent bytes, and bytes held."""
    model, recipe, workload = prepare(case)
    plan = make_plan(model, workload, MeshConfig(*case.mesh))
    whole = sum(parameter.numel() for parameter in model.parameters())
    mesh = build_mesh(MeshConfig(*case.mesh), "cpu")
    shard_model(model, mesh, bfloat16=case.bfloat16)
    optimizer = OPTIMIZERS.get(case.optimizer).build(
        parameter_groups(model), clipping_threshold=1.0, weight_decay=0.0, **case.options
    )
    here = {name: value[mesh.rows(ROWS)] for name, value in batch().items()}
    grads = []
    optimizer.register_step_pre_hook(
        lambda *_: grads.append(local_bytes(p.grad for p in model.parameters()))
    )
    with SentBytes() as sent:
        train_step(model, optimizer, recipe, here, 0, mesh)
    state = []
    for values in optimizer.state.values():
        state += [value for value in values.values() if isinstance(value, torch.Tensor)]
    held = {
        "whole": (plan.num_parameters, whole),
        "parameters": (plan.parameters, local_bytes(model.parameters())),
        "gradients": (plan.gradients, grads[0]),
        "optimizer": (plan.optimizer, local_bytes(value for value in state if value.ndim)),
    }
    part = {name: value[: workload.rows_of_pass(mesh.config)] for name, value in here.items()}
    counts = model.loss_counts(part)  # of this rank: memory alone is measured
    with SavedBytes(model) as saved, torch.autocast("cpu", torch.bfloat16, enabled=case.bfloat16):
        model(**part, loss_counts=counts)
    planned = activations(model, workload, mesh.config, cpu=True).saved
    held["activations"] = (planned, saved.activations)
    return planned_bytes(plan.transfers, mesh), sent.found, held


def on_a_rank(rank, num_ranks, cases):
    return {name: count_run(case) for name, case in cases.items()}


def far(planned, found, share):
    """Returns whether a plan is off by more than a share."""
    return abs(planned - found) > share * found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns what each of 4 ranks counted of each case."""
    return run_ranks(on_a_rank, 4, tmp_path_factory.mktemp("runs"), EXACT | DROPPING)


@pytest.mark.slow
def test_a_run_on_4_ranks_sends_and_holds_what_is_planned(runs):
    wrong = {}
    for rank, answers in enumerate(runs):
        for name in EXACT:
            planned, sent, held = answers[name]
            for key in planned.keys() | sent.keys():
                if far(planned.get(key, 0.0), sent.get(key, 0.0), 0.02):
                    wrong[rank, name, key] = planned.get(key), sent.get(key)
            for what, (plan, found) in held.items():
                padded = rank > 0 and what != "activations"  # the first shards are the largest
                if far(plan, found, 0.1 if what == "activations" else 0.02) and not (
                    padded and plan > found
                ):
                    wrong[rank, name, what] = plan, found
    assert not wrong


@pytest.mark.slow
def test_what_is_planned_of_ragged_rows_is_the_most_that_can_travel(runs):
    rows = "rows to experts and back"
    for name in DROPPING:
        most, sent = 0.0, 0.0
        for answers in runs:
            planned, found, _ = answers[name]
            most += math.fsum(value for key, value in planned.items() if key[0] == rows)
            sent += math.fsum(value for key, value in found.items() if key[0] == rows)
            others = {key for key, value in found.items() if key[0] != rows and value}
            assert not {key: found[key] for key in others if far(planned[key], found[key], 0.02)}
        assert 0.5 * most < sent <= 1.1 * most  # rows that stay are not spread quite evenly
