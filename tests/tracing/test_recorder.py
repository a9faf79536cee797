"""Traces and their files. Oracles: the plans that the model reports; safetensors' own reader."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from moe import ConfigError, DataError
from moe.checksums import SUMS_FILE
from moe.sparse.all_routers import load_routers
from moe.tracing.recorder import Provenance, TracedBatch, record_routing, traced_batches
from moe.tracing.trace import expert_dtype, layer_name, trace_tensors
from moe.tracing.trace_file import (
    FACTS_FILE,
    TENSORS_FILE,
    read_trace,
    record_to_folder,
    save_trace,
)
from tests.tracing.models import E, build_batch, build_model

BATCHES = [build_batch(seed=1), build_batch(rows=4, length=9, targets=5, seed=2)]


def same(a, b):
    a, b = trace_tensors(a), trace_tensors(b)
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
    )


@pytest.mark.parametrize("router", load_routers().names())
def test_a_trace_holds_the_plans_of_the_model(router):
    model = build_model(router)
    trace = record_routing(model, traced_batches(BATCHES))
    assert not model.training
    with torch.no_grad():
        outputs = [model(**batch, output_router_logits=True) for batch in BATCHES]

    # The encoder's: groups are of all sequences of these small batches.
    real = torch.cat([batch["input_ids"][batch["attention_mask"] == 1] for batch in BATCHES])
    assert torch.equal(trace.encoder.ids.long(), real)
    for number, layer in enumerate(trace.encoder.layers):
        plans = [output.encoder_router_outputs[number].plan for output in outputs]

        def of_real_tokens(name, plans=plans):
            return torch.cat([getattr(plan, name)[plan.token_mask] for plan in plans])

        requested = of_real_tokens("requested")
        assert torch.equal(layer.accepted, of_real_tokens("accepted"))
        assert torch.equal(layer.expert.long(), of_real_tokens("expert_index"))
        assert torch.equal(layer.choices >= 0, requested)
        assert torch.equal(layer.gate, of_real_tokens("combine_weight"))
        assert layer.stats.num_tokens == len(real)
        asked = layer.first >= 0
        assert torch.equal(asked, requested.any(dim=-1))
        first_is_asked = (layer.choices[asked] == layer.first[asked, None]).any(dim=-1)
        assert first_is_asked.all()


def test_examples_positions_and_targets():
    trace = record_routing(build_model(), traced_batches(BATCHES, domain="test"))
    decoder = trace.decoder
    labels = torch.cat([batch["labels"][batch["labels"] >= 0] for batch in BATCHES])
    assert torch.equal(decoder.targets.long(), labels)

    # Inputs are the labels before, behind the start token.
    is_first = decoder.position == 0
    assert (decoder.ids[is_first] == 0).all()
    assert torch.equal(decoder.ids[~is_first], decoder.targets[:-1][~is_first[1:]])
    lengths = [int((row >= 0).sum()) for batch in BATCHES for row in batch["labels"]]
    assert decoder.example.bincount().tolist() == lengths
    assert trace.facts.num_examples == 10
    assert trace.document.tolist() == list(range(10))
    assert trace.facts.domains == ["test"]
    names = [layer_name(layer.key) for layer in trace.layers]
    assert names == ["encoder 1", "encoder 2", "decoder 1"]


def test_the_loss_is_that_of_the_model_over_all_targets():
    model = build_model()
    trace = record_routing(model, traced_batches(BATCHES))
    losses = []
    for batch in BATCHES:
        labels = batch["labels"]
        logits = model(**batch).logits.detach()
        losses.append(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none"))
    num_targets = trace.decoder.targets.numel()
    assert trace.facts.loss == pytest.approx(float(torch.cat(losses).sum()) / num_targets)


def test_best_experts_are_kept_where_they_are_asked_for():
    model = build_model()
    trace = record_routing(model, traced_batches(BATCHES[:1]), num_best=3)
    output = model(**BATCHES[0], output_router_logits=True)
    router = output.decoder_router_outputs[0]
    best = router.router_logits.softmax(-1)[router.plan.token_mask].topk(3)
    layer = trace.decoder.layers[0]
    assert torch.equal(layer.best_expert.long(), best.indices)
    torch.testing.assert_close(layer.best_prob, best.values.half())
    assert record_routing(model, traced_batches(BATCHES)).layers[0].best_prob.shape[1] == 0
    with pytest.raises(ConfigError, match="num_best is 5"):
        record_routing(model, traced_batches(BATCHES), num_best=E + 1)


def test_recording_moves_neither_the_mode_nor_the_random_numbers():
    model = build_model(dropout_rate=0.5).train()
    state = torch.get_rng_state()
    first = record_routing(model, traced_batches(BATCHES))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert same(record_routing(model.eval(), traced_batches(BATCHES)), first)


def test_nothing_batches_without_labels_and_several_examples_in_a_row_are_refused():
    model, batch = build_model(), build_batch()
    segments = {**batch, "segment_ids": torch.full((6, 13), 2)}
    del segments["attention_mask"], batch["labels"]
    for refused in (batch, segments):
        with pytest.raises(DataError, match="needs labels, and one example in each row"):
            record_routing(model, [TracedBatch(refused, range(6), [""] * 6)])
    with pytest.raises(DataError, match="nothing to trace"):
        record_routing(model, [])


# ---------------------------------------------------------------------------
# Files


def test_what_is_written_while_it_comes_is_what_is_written_at_once(tmp_path):
    model, options = build_model(), {"num_best": 2, "provenance": Provenance("random")}
    trace = record_routing(model, traced_batches(BATCHES), **options)
    save_trace(trace, tmp_path / "whole")
    record_to_folder(model, traced_batches(BATCHES), tmp_path / "stream", **options)
    for folder in (tmp_path / "whole", tmp_path / "stream"):
        read = read_trace(folder)
        assert same(read, trace)
        assert read.facts == trace.facts
        names = sorted(path.name for path in folder.iterdir())
        assert names == [SUMS_FILE, FACTS_FILE, TENSORS_FILE]

        # Another library reads the file.
        tensors = load_file(folder / TENSORS_FILE)
        for name, values in trace_tensors(trace).items():
            assert torch.equal(tensors[name], values)

    # An earlier trace is replaced, whole.
    record_to_folder(model, traced_batches(BATCHES[:1]), tmp_path / "whole")
    assert read_trace(tmp_path / "whole").facts.num_examples == 6


def test_a_million_tokens_fit_into_twenty_megabytes(tmp_path):
    model = build_model(num_sparse_encoder_layers=1)
    save_trace(record_routing(model, traced_batches(BATCHES)), tmp_path / "few")
    save_trace(record_routing(model, traced_batches(BATCHES * 5)), tmp_path / "many")
    sizes = [(tmp_path / name / TENSORS_FILE).stat().st_size for name in ("few", "many")]
    tokens = sum(int((batch["attention_mask"] > 0).sum()) for batch in BATCHES)
    tokens += sum(int((batch["labels"] >= 0).sum()) for batch in BATCHES)
    assert (sizes[1] - sizes[0]) / (4 * tokens) < 20


def test_a_failed_recording_leaves_what_was_there(tmp_path):
    folder = tmp_path / "trace"
    model = build_model()
    record_to_folder(model, traced_batches(BATCHES), folder)
    expected = read_trace(folder)

    def broken():
        yield from traced_batches(BATCHES[:1])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record_to_folder(model, broken(), folder)
    assert same(read_trace(folder), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


@pytest.fixture
def unsummed(tmp_path):
    """Returns the folder of a trace without checksums."""
    folder = tmp_path / "trace"
    save_trace(record_routing(build_model(), traced_batches(BATCHES)), folder)
    (folder / SUMS_FILE).unlink()
    return folder


def test_damage_is_named(tmp_path, unsummed):
    save_trace(read_trace(unsummed), tmp_path / "summed")
    path = tmp_path / "summed" / TENSORS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DataError, match=r"trace\.safetensors is damaged.*Record it again"):
        read_trace(tmp_path / "summed")

    (unsummed / TENSORS_FILE).write_bytes(b"\xff" * 40)
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(unsummed)
    with pytest.raises(DataError, match="is not a trace"):
        read_trace(tmp_path)


def test_tensors_that_do_not_fit_are_refused(unsummed):
    whole = load_file(unsummed / TENSORS_FILE)
    for name, changed in (
        ("decoder.ids", whole["decoder.ids"][1:]),
        ("encoder.ids", whole["encoder.ids"] + 1),
        ("encoder.starts", whole["encoder.starts"].flip(0)),
    ):
        save_file({**whole, name: changed}, unsummed / TENSORS_FILE)
        with pytest.raises(DataError, match="different token ids"):
            read_trace(unsummed)
    for name in ("encoder.0.expert", "decoder.0.first"):
        save_file({**whole, name: torch.full_like(whole[name], 77)}, unsummed / TENSORS_FILE)
        with pytest.raises(DataError, match=f"{name} names an expert beyond"):
            read_trace(unsummed)
    del whole["encoder.0.first"]
    save_file(whole, unsummed / TENSORS_FILE)
    with pytest.raises(DataError, match=r"it has no 'encoder.0.first'"):
        read_trace(unsummed)


def test_facts_that_do_not_fit_are_refused(unsummed):
    path = unsummed / FACTS_FILE
    facts = json.loads(path.read_text())
    for changes, message in (
        ({"version": 2}, "format is 2"),
        ({"num_examples": "9"}, "num_examples is '9'"),
        ({"inputs_fingerprint": "0" * 64}, "different token ids"),
    ):
        path.write_text(json.dumps({**facts, **changes}))
        with pytest.raises(DataError, match=message):
            read_trace(unsummed)


def test_experts_have_the_smallest_numbers_that_hold_them():
    assert expert_dtype(128) == torch.int8
    assert expert_dtype(129) == torch.int16


def test_a_batch_without_its_documents_is_refused_with_what_adds_them():
    with pytest.raises(ConfigError, match=r"batch to record is .*traced_batches"):
        record_routing(build_model(), [build_batch()])
