"""What every host must do, whichever records are in moe/hosts/records.py.

The oracle is the dense host: with copied experts whose gates sum to 1, its twin computes the same.
"""

import copy
import subprocess
import sys

import pytest
import torch
import transformers
from packaging.version import Version
from peft import get_peft_model

from moe import lora_config
from moe.checkpoint.loading import load_model
from moe.errors import CheckpointError, ConfigError
from moe.hosts.all_hosts import HOSTS
from moe.hosts.upcycle import upcycle_host
from moe.models.pretrained import enable_activation_checkpointing
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.edits import RerouteExperts
from moe.surgery.upcycle import Upcycling
from moe.tracing.recorder import record_routing, traced_batches
from tests.hosts.tiny_hosts import TINY, dense_host, host_batch, sparse_host
from tests.models.tiny import tiny_batch

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

NAMES = HOSTS.names()
each_host = pytest.mark.parametrize("name", NAMES)
REAL = tiny_batch()["labels"] != -100
BEFORE_NORM = [name for name in NAMES if HOSTS.get(name).host.norm_after]
LISTENS = ["whisper"]
BEAMS_OF_TWO_VOCABULARIES = Version(transformers.__version__) >= Version("5.23")
READS = [name for name in NAMES if name not in LISTENS]


def close(a, b, atol=1e-5, rtol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=rtol)


def batch_for(model, seed=0):
    return host_batch(model.config.model_type.removeprefix("sparse_"), seed)


def logits(model, **changes):
    """Returns the logits of positions with a target."""
    with torch.no_grad():
        return model(**{**batch_for(model), **changes}).logits[REAL]


def generated(model, **options):
    inputs = batch_for(model)
    del inputs["labels"]
    return model.generate(**inputs, max_new_tokens=9, do_sample=False, **options)


def test_every_host_has_a_tiny_model():
    assert sorted(TINY) == NAMES


def test_help_on_the_forward_pass_of_a_host_says_what_it_adds():
    for name in NAMES:
        assert "losses of the routers" in HOSTS.get(name).forward.__doc__


@each_host
@pytest.mark.parametrize("training", [False, True])
def test_a_host_and_its_upcycled_twin_agree(name, training):
    dense, sparse = dense_host(name).train(training), sparse_host(name).train(training)
    assert isinstance(sparse, type(dense))
    assert list(sparse_layers(sparse)) == [("encoder", 0), ("decoder", 0)]
    theirs, ours = dense(**host_batch(name)), sparse(**host_batch(name))
    close(ours.ce_loss, theirs.loss)
    close(ours.logits[REAL], theirs.logits[REAL])
    if training:
        return
    for options in ({}, {"use_cache": False}, {"num_beams": 3}):
        if name != "marian" or "num_beams" not in options or BEAMS_OF_TWO_VOCABULARIES:
            assert torch.equal(generated(sparse, **options), generated(dense, **options))


@each_host
def test_labels_with_holes_leave_the_twins_equal(name):
    batch = host_batch(name)
    batch["labels"][:, :2] = -100
    batch["labels"][:, 5] = -100
    if name in LISTENS:
        batch["input_features"] = batch["input_features"].double()

    # Gates are float32 even so, and a norm after the feed-forward enlarges differences.
    sparse = sparse_host(name).double()
    dense = dense_host(name).double()
    tolerance = 1e-5 if name in BEFORE_NORM else 1e-7
    close(logits(sparse, **batch), logits(dense, **batch), tolerance, tolerance)


@pytest.mark.parametrize("name", BEFORE_NORM)
def test_any_gate_gives_the_host_but_for_the_eps_of_its_norm(name):
    fields = {"router": "switch", "router_initializer_std": 0.02}
    switch = Upcycling(num_experts=8, num_selected_experts=1, fields=fields)
    dense = dense_host(name)
    norm_after = HOSTS.get(name).host.norm_after
    norms = [part for path, part in dense.named_modules() if path.endswith(norm_after)]
    for norm in norms:
        norm.eps = 1e-12
    gated = upcycle_host(copy.deepcopy(dense), switch)
    close(logits(gated), logits(dense), atol=2e-5, rtol=1e-4)


@each_host
def test_padding_is_not_routed_and_changes_nothing(name):
    sparse = sparse_host(name, fields={"capacity_factor": 1.0, "eval_capacity_factor": 1.0})
    batch = host_batch(name)
    output = sparse(**batch, output_router_logits=True)
    all_heard = torch.ones(4, 13)
    encoder_mask = batch.get("attention_mask", all_heard).bool()
    for records, mask in (
        (output.encoder_router_outputs, encoder_mask),
        (output.decoder_router_outputs, REAL),
    ):
        assert len(records) == 1
        for record in records:
            assert torch.equal(record.plan.token_mask.reshape(mask.shape), mask)
    if name in READS:
        ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 77)
        close(sparse(**{**batch, "input_ids": ids}).loss, output.loss, atol=1e-6, rtol=0)

    # A mask for the decoder overrides the labels.
    mask = REAL.long()
    mask[:, 0] = 0
    masked = sparse(**batch, decoder_attention_mask=mask, output_router_logits=True)
    routed = masked.decoder_router_outputs[0].plan.token_mask.reshape(mask.shape)
    assert torch.equal(routed, mask.bool())


@each_host
def test_functions_of_transformers_run_experts_without_biases(name):
    model = sparse_host(name)
    expected = logits(model)
    model.set_experts_implementation("batched_mm")
    experts = next(iter(sparse_layers(model).values())).experts
    if any(extra is not None for extra in experts.product_weights()[2:]):
        with pytest.raises(
            ConfigError, match="'batched_mm'; expected 'eager' for experts with biases"
        ):
            logits(model)
    else:
        close(logits(model), expected)


@each_host
def test_losses_of_the_routers_reach_the_loss_and_add_up_over_parts(name):
    fields = {
        "group_size": 1,
        "load_balance_loss_weight": 3.0,
        "router_z_loss_weight": 2.0,
        "convention": "flaxformer",
    }
    sparse = sparse_host(name, fields=fields)
    batch = host_batch(name)
    output = sparse(**batch)
    expected = output.ce_loss + 3 * output.load_balance_loss + 2 * output.router_z_loss
    close(output.loss, expected)
    output.loss.backward()
    assert sparse_layers(sparse)["encoder", 0].router.gate.grad.abs().max() > 1e-3

    # Parts of a batch, as the Trainer accumulates them.
    num_items = int(REAL.sum())
    whole = sparse(**batch, num_items_in_batch=num_items)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        part = {key: value[rows] for key, value in batch.items()}
        parts.append(sparse(**part, num_items_in_batch=num_items).loss)
    close(sum(parts), whole.loss)
    assert isinstance(sparse(**batch, return_dict=False), tuple)
    part["labels"][:] = -100
    if name != "mbart":  # it begins each row with its last target
        assert sparse(**part, num_items_in_batch=num_items).loss == 0


def gradients(model, checkpointed, dtype):
    model = model.to(dtype).train()
    if checkpointed:
        enable_activation_checkpointing(model, {"use_reentrant": False})
    first, second = batch_for(model), batch_for(model, seed=1)
    second["labels"][:, -4:] = -100
    if "attention_mask" in second:
        second["attention_mask"][:, -4:] = 0

    # Both forward passes before the first backward pass: each needs its own mask again.
    losses = []
    for batch in (first, second):
        batch = {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
        losses.append(model(**batch).loss)
    for loss in losses:
        loss.backward()
    return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}


@each_host
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointed_gradients_are_the_same(name, dtype):
    fields = {"capacity_factor": 1.0}
    plain = gradients(sparse_host(name, fields=fields), False, dtype)
    again = gradients(sparse_host(name, fields=fields), True, dtype)
    assert plain.keys() == again.keys() and "experts.down_proj" in " ".join(plain)
    for key, gradient in plain.items():
        assert gradient.dtype == dtype and gradient.isfinite().all()
        assert torch.equal(gradient, again[key]), key


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
@each_host
def test_experts_learn_by_lora(name, tmp_path):
    sparse = sparse_host(name)
    before = logits(sparse)
    model = get_peft_model(sparse, lora_config(sparse, rank=2))
    adapted = [
        name.partition(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name
    ]
    ends = {name.rpartition(".")[2] for name in adapted}
    assert {"experts", "base_layer", "q_proj"} <= ends and ends & {"o_proj", "out_proj"}
    assert not any("lm_head" in name for name in adapted)
    close(logits(model), before)
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(3):
        losses.append(model(**host_batch(name)).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    trained = logits(model.eval())
    merged = model.merge_and_unload()
    assert isinstance(merged, type(sparse))
    close(logits(merged), trained)

    # PEFT compares the encoder's embedding with the head; the head of T5Gemma is the decoder's.
    merged.config.tie_word_embeddings = True
    merged.save_pretrained(tmp_path)
    close(logits(load_model(tmp_path)), trained)


def first_experts(trace, key):
    """Returns the first expert of each real token of a layer."""
    (layer,) = [layer for layer in trace.layers if layer.key == key]
    return layer.expert[:, 0].long()


@pytest.mark.parametrize("name", READS)
def test_routing_can_be_edited_and_recorded(name):
    sparse = sparse_host(name, differ=True)
    trace = record_routing(sparse, traced_batches([tiny_batch()]))
    assert trace.facts.num_examples == 4 and len(trace.layers) == 2
    key = ("decoder", 0)
    favourite = int(first_experts(trace, key).mode().values)
    with edit_routing(sparse, {key: RerouteExperts(favourite)}):
        edited = record_routing(sparse, traced_batches([tiny_batch()]))
    assert favourite not in first_experts(edited, key)
    assert edited.facts.loss != trace.facts.loss


@each_host
def test_a_saved_host_computes_bit_for_bit_the_same(name, tmp_path):
    sparse = sparse_host(name, fields={"expert_bias": "multiplicative"})
    sparse.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded) is type(sparse) and loaded.settings == sparse.settings
    assert torch.equal(logits(loaded), logits(sparse))
    assert load_model(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16

    # A weight that is not there is no reason to draw one.
    weights = sparse.state_dict()
    gate = next(key for key in weights if key.endswith("gate"))
    del weights[gate]
    sparse.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(CheckpointError, match=r"router\.gate"):
        load_model(tmp_path)


IN_A_FRESH_PROCESS = """
import sys, torch
from transformers import AutoModelForSeq2SeqLM
for folder in sys.argv[1:]:
    try:
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    except ValueError as error:
        print(str(error).splitlines()[0])
from moe.checkpoint.loading import load_model
for folder in sys.argv[1:]:
    saved = torch.load(f"{folder}/inputs.pt")
    model = load_model(folder)
    for model in (model, model.host.auto_class.from_pretrained(folder)):
        with torch.no_grad():
            difference = model(**saved["batch"]).logits - saved["logits"]
        print(type(model).__name__, difference.abs().max().item() < 1e-4)
"""


@pytest.mark.slow
def test_a_fresh_process_restores_hosts_or_refuses_them(tmp_path):
    folders = []
    restored = []
    for name in NAMES:
        sparse = sparse_host(name)
        folders.append(str(tmp_path / name))
        sparse.save_pretrained(folders[-1])
        with torch.no_grad():
            batch = host_batch(name)
            inputs = {"batch": batch, "logits": sparse(**batch).logits}
        torch.save(inputs, tmp_path / name / "inputs.pt")
        restored += [f"{type(sparse).__name__} True"] * 2
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, *folders]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = ended.stdout.splitlines()
    for name, refusal in zip(NAMES, lines, strict=False):
        assert f"`sparse_{name}`" in refusal and "does not recognize" in refusal
    assert lines[len(NAMES) :] == restored
