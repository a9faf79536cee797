"""A model on a mesh gives the numbers of one process: losses, statistics, every gradient, and the
weights after several updates.

The oracle is the same model, whole, with the whole batch, in one process; groups of tokens are the
same on both sides. The first rank computes the oracle for all; each returns how far it is from it.
"""

import functools
import json

import pytest
import torch
import torch.distributed as dist

from moe.data.tokenizer import SpecialIds
from moe.distributed.collectives import broadcast_from_rank_zero
from moe.distributed.mesh import MeshConfig, build_mesh
from moe.distributed.sharding import MeshCoordinate
from moe.models.parallelize import draw_weights, model_layouts, shard_model
from moe.models.pretrained import enable_activation_checkpointing
from moe.optim.adafactor import Adafactor
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from moe.training.heldout_loss import HeldOut, evaluate_held_out
from moe.training.recipe import OptimRecipe, PretrainRecipe, TrainingRecipe
from tests.distributed.ranks import run_ranks, whole
from tests.models.tiny import UL2_AND_UMT5, tiny_model
from tests.training.one_step import train_step

FIELDS = {
    "vocab_size": 53,
    "d_model": 13,
    "d_kv": 3,
    "d_ff": 20,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "num_experts": 8,
    "group_size": 26,
}
ROWS, LENGTH, TARGETS = 16, 13, 11

CASES = {
    "ragged": {},
    "static, accumulated, checkpointed": {"dispatch": "static", "micro": 2, "checkpointed": True},
    "dropless, relu, tied head": {
        "capacity_factor": None,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
    "balanced over the ranks, biases": {
        "balance_scope": "ranks",
        "micro": 2,
        "router": "bias_balanced",
        "router_options": {"score": "sigmoid"},
        "num_shared_experts": 1,
    },
    "accumulated, checkpointed, adamw": {"micro": 2, "checkpointed": True, "optimizer": "adamw"},
    "lars": {"optimizer": "lars"},
    "by a function of transformers": {"experts_implementation": "batched_mm"},
    "lamb, narrow experts": {"optimizer": "lamb", "expert_d_ff": 12, "num_shared_experts": 3},
    "muon, UL2 and umT5": {
        "optimizer": "muon",
        "num_shared_experts": 1,
        "expert_bias": "multiplicative",
        **UL2_AND_UMT5,
    },
    "balanced over all ranks": {"balance_scope": "global", "micro": 2},
    "without tokens on a rank": {"hole": True},
    "fewer experts in the decoder": {"decoder_experts": [4]},
    "all tokens on two experts": {"crowded": True, "capacity_factor": None},
    "bias_balanced, expert bias": {
        "relative_bias_in_every_block": True,
        "router": "bias_balanced",
        "router_options": None,
        "expert_bias": "multiplicative",
        "num_shared_experts": 1,
    },
}
MESHES = {  # dp_replicate, dp_shard, ep, tp, nodes
    "with experts on other ranks": {
        (1, 1, 4, 1): ("ragged", "all tokens on two experts"),
        (1, 1, 4, 1, 2): ("static, accumulated, checkpointed", "without tokens on a rank"),
        (1, 2, 2, 1): ("without tokens on a rank", "balanced over the ranks, biases", "lars"),
        (2, 1, 2, 1): ("ragged", "fewer experts in the decoder"),
    },
    "with sharded layers": {
        (1, 1, 2, 2): (
            "ragged",
            "by a function of transformers",
            "dropless, relu, tied head",
            "all tokens on two experts",
            "lamb, narrow experts",
            "muon, UL2 and umT5",
        ),
        (1, 4, 1, 1): ("bias_balanced, expert bias",),
        (2, 2, 1, 1): ("balanced over all ranks",),
        (2, 1, 1, 2): ("accumulated, checkpointed, adamw",),
        (1, 1, 1, 4): ("static, accumulated, checkpointed",),
    },
}
"""Cases of each mesh of four ranks: every case on one of them, every kind of mesh with one."""

MANY, FEW = 11, 2
"""Updates of a case. A wrong sum shows in the first gradient, a wrong state in the second update; that
rounding stays small over many updates does not depend on the mesh.
"""


def build(dtype, checkpointed=False, crowded=False, **fields):
    """Returns a model in training mode, the same on each rank."""
    model = tiny_model(**{**FIELDS, **fields}).to(dtype).train()
    if checkpointed:
        enable_activation_checkpointing(model, {"use_reentrant": False})
    if crowded:  # gates that see no more than the length of a token, which is the same for all
        for layer in model.sparse_layers():
            layer.router.gate.data[:] = 0
    return model


def recipe(dtype, micro=None, optimizer="adafactor", precision="float32"):
    """Returns settings of a run; in float32 with small steps, else rounding soon sends a token to
    another expert.
    """
    lr = 0.1 if dtype == torch.float64 and optimizer == "adafactor" else 1e-3
    return PretrainRecipe(
        optim=OptimRecipe(optimizer=optimizer, lr=lr, warmup_steps=1, max_grad_norm=0.5),
        training=TrainingRecipe(
            steps=99, batch_size=ROWS, micro_batch_size=micro, precision=precision
        ),
    )


def batch(step, hole):
    """Returns a batch with padding; with a hole, its second quarter, which is some rank's all, has
    no tokens at all.
    """
    generator = torch.Generator().manual_seed(step)
    mask = (torch.rand(ROWS, LENGTH, generator=generator) > 0.2).long()
    labels = torch.randint(2, FIELDS["vocab_size"], (ROWS, TARGETS), generator=generator)
    labels = labels.masked_fill(torch.rand(ROWS, TARGETS, generator=generator) < 0.2, -100)
    if hole:
        mask[4:8], labels[4:8] = 0, -100
    ids = torch.randint(2, FIELDS["vocab_size"], (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


class Batches:
    """What a held-out evaluation reads."""

    batch_size = ROWS

    def batch(self, step, rows):
        return {name: value[rows] for name, value in batch(step, hole=True).items()}


HELD_OUT = HeldOut(Batches(), 1, SpecialIds(pad=0, eos=1, first_sentinel=52, num_sentinels=2))


def run(dtype, steps, mesh=None, *, hole=False, micro=None, optimizer="adafactor", **fields):
    """Returns all numbers of a run: losses and statistics by step, first gradients, last weights,
    held-out loss, weights drawn anew.
    """
    model, settings = build(dtype, **fields), recipe(dtype, micro, optimizer)
    sizes, coordinate = MeshConfig(), MeshCoordinate(0, 0, 0, 0)
    if mesh is None:
        layouts = model_layouts(model, model.config, sizes)
    else:
        sizes, coordinate = mesh.config, MeshCoordinate.of(mesh)
        layouts = shard_model(model, mesh)
    groups = parameter_groups(model)
    optim = OPTIMIZERS.get(optimizer).build(groups, clipping_threshold=1.0, weight_decay=0.0)
    numbers = {}

    def keep_first_gradients(*_):
        if numbers:
            return
        for name, parameter in model.named_parameters():
            numbers[f"gradient {name}"] = whole(parameter.grad)

    optim.register_step_pre_hook(keep_first_gradients)
    for step in range(steps):
        data = batch(step, hole)
        if mesh is not None:
            data = {name: value[mesh.rows(ROWS)] for name, value in data.items()}
        metrics = train_step(model, optim, settings, data, step, mesh)
        for name in ("loss", "ce_loss", "grad_norm", "tokens"):
            numbers[f"{name} {step}"] = getattr(metrics, name)
        for stack in ("encoder", "decoder"):
            for name, value in getattr(metrics, f"{stack}_stats")._asdict().items():
                numbers[f"{stack} {name} {step}"] = value

    for name, parameter in model.named_parameters():
        numbers[f"weight {name}"] = whole(parameter)
    if not fields.get("crowded"):  # unused experts stay tied
        for name, value in evaluate_held_out(model, HELD_OUT, mesh).items():
            numbers[name] = torch.tensor(value, dtype=torch.float64)

    draw_weights(model, 7, layouts, sizes, coordinate)
    for name, parameter in model.named_parameters():
        numbers[f"drawn {name}"] = whole(parameter)
    return numbers


def distance(ours, theirs):
    """Returns the largest difference, relative to the largest entry."""
    theirs = theirs.double()
    return float(
        (ours.double().reshape(theirs.shape) - theirs).abs().max()
        / theirs.abs().max().clamp(min=1e-30)
    )


def on_a_rank(rank, num_ranks, cases):
    """Returns for each case how far each of its numbers is from that of one process."""
    one_process = functools.cache(
        lambda dtype, steps, fields: broadcast_from_rank_zero(
            lambda: run(dtype, steps, **json.loads(fields))
        )
    )
    answers = {}
    for name, (sizes, dtype, steps, fields) in cases.items():
        theirs = one_process(dtype, steps, json.dumps(fields))
        ours = run(dtype, steps, build_mesh(MeshConfig(*sizes), "cpu"), **fields)
        assert ours.keys() == theirs.keys()
        answers[name] = {number: distance(ours[number], theirs[number]) for number in theirs}
    return answers


def assert_near(answers, tolerance):
    far = [
        (value, case, name)
        for answer in answers
        for case, numbers in answer.items()
        for name, value in numbers.items()
        if not value <= tolerance
    ]
    assert not far, sorted(far, key=lambda entry: -entry[0])[:5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
def test_every_kind_of_layer_and_batch_and_optimizer_equals_one_process_on_a_mesh(kind, tmp_path):
    cases = {}
    for sizes, names in MESHES[kind].items():
        for name in names:
            cases[sizes, name] = (sizes, torch.float64, FEW, CASES[name])
    assert_near(run_ranks(on_a_rank, 4, tmp_path, cases), 1e-10)


@pytest.mark.slow
def test_many_updates_on_two_ranks_equal_those_of_one_process(tmp_path):
    static = CASES["static, accumulated, checkpointed"]
    cases = {
        "ep 2": ((1, 1, 2, 1), torch.float64, MANY, {}),
        "tp 2": ((1, 1, 1, 2), torch.float64, FEW, static),
    }
    float32 = {"float32": ((1, 1, 1, 2), torch.float32, MANY, {})}
    for answer in run_ranks(on_a_rank, 2, tmp_path, {**cases, **float32}):
        assert_near([{"float32": answer.pop("float32")}], 1e-5)
        assert_near([answer], 1e-10)


@pytest.mark.slow
def test_updates_on_all_axes_at_once_equal_those_of_one_process(tmp_path):
    static = CASES["static, accumulated, checkpointed"]
    cases = {"all axes": ((1, 2, 2, 2), torch.float64, FEW, static)}
    assert_near(run_ranks(on_a_rank, 8, tmp_path, cases), 1e-10)


def in_bfloat16(rank, num_ranks):
    """Returns what travelled in which dtype, and the losses of a mesh and of one process."""
    seen = {"all_to_all_single": set(), "reduce_scatter_single": set(), "all_gather_single": set()}
    originals = {name: getattr(dist, name) for name in seen}

    def watch(name):
        def call(*arguments, **options):
            second = arguments[1] if len(arguments) > 1 else None
            x = options.get("input_tensor", options.get("input", second))
            seen[name].add(str(x.dtype))
            return originals[name](*arguments, **options)

        return call

    answers = {}
    for dispatch in ("ragged", "static"):
        theirs, ours = (build(torch.float32, dispatch=dispatch) for _ in range(2))
        mesh = build_mesh(MeshConfig(dp_shard=2, ep=2), "cpu")
        shard_model(ours, mesh, bfloat16=True)
        optimizers = [Adafactor(parameter_groups(model)) for model in (ours, theirs)]
        settings = recipe(torch.float32, 2, precision="bfloat16")
        losses = []
        for step in range(2):
            data = batch(step, hole=False)
            here = {name: value[mesh.rows(ROWS)] for name, value in data.items()}
            for name in seen:
                setattr(dist, name, watch(name))
            metrics = train_step(ours, optimizers[0], settings, here, step, mesh)
            for name, original in originals.items():
                setattr(dist, name, original)
            expected = train_step(theirs, optimizers[1], settings, data, step)
            losses.append((metrics.loss, expected.loss))
        measured = evaluate_held_out(ours, HELD_OUT, mesh, bfloat16=True)
        for name, expected in evaluate_held_out(theirs, HELD_OUT, bfloat16=True).items():
            losses.append((torch.tensor(measured[name]), torch.tensor(expected)))
        answers[dispatch] = losses
    return {"dtypes": {name: sorted(dtypes) for name, dtypes in seen.items()}, "losses": answers}


@pytest.mark.slow
def test_in_bfloat16_rows_travel_in_it_and_gradients_are_summed_in_float32(tmp_path):
    for answer in run_ranks(in_bfloat16, 4, tmp_path):
        assert answer["dtypes"] == {
            "all_to_all_single": ["torch.bfloat16", "torch.int64"],
            "reduce_scatter_single": ["torch.float32"],
            "all_gather_single": ["torch.bfloat16", "torch.float32"],
        }
        for losses in answer["losses"].values():
            for ours, theirs in losses:
                torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0)


def balanced_over_a_replica(rank, num_ranks):
    """Returns how far two replicas, each a scope of its own, are from as many micro-batches."""
    fields = {"balance_scope": "micro_batch", "micro": ROWS // 2}
    theirs = run(torch.float64, 2, **fields, load_balance_loss_weight=3.0)
    others = run(torch.float64, 2, balance_scope="global", load_balance_loss_weight=3.0)
    mesh = build_mesh(MeshConfig(dp_replicate=2, ep=2), "cpu")
    fields = {"balance_scope": "ranks", "micro": 2, "load_balance_loss_weight": 3.0}
    ours = run(torch.float64, 2, mesh, **fields)
    far = max(distance(ours[number], theirs[number]) for number in theirs)
    return far, distance(others["loss 0"], theirs["loss 0"])


@pytest.mark.slow
def test_a_balance_over_the_ranks_of_a_replica_is_that_of_its_rows_in_one_process(tmp_path):
    for far, far_of_global in run_ranks(balanced_over_a_replica, 4, tmp_path):
        assert far < 1e-10
        assert far_of_global > 1e-6  # all rows together are another scope
