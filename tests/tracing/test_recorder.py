"""Traces and their files. Oracles: the plans that the model reports; another reader of Parquet."""

import json

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from moe import ConfigError, DataError
from moe.checksums import SUMS_FILE
from moe.parsing import to_json
from moe.sparse.all_routers import load_routers
from moe.sparse.editing import STACKS
from moe.tracing.recorder import Provenance, Recording, TracedBatch, record_routing, traced_batches
from moe.tracing.trace import CHOICES, expert_dtype, layer_name, trace_from
from moe.tracing.trace_file import TRACE_FILE, read_trace, record_to_folder
from tests.tracing.models import E, build_batch, build_model

BATCHES = [build_batch(seed=1), build_batch(rows=4, length=9, targets=5, seed=2)]


def same(a, b):
    """Returns whether two values are equal; tensors in dtype, too."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


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
        if router == "token_choice":
            assert torch.equal(layer.first, layer.expert[:, 0])


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


def test_a_segment_is_an_example_and_batches_without_labels_or_of_packed_rows_are_refused():
    model, batch = build_model(), build_batch()
    trace = record_routing(model, traced_batches([batch]))
    segments = {**batch, "segment_ids": batch["attention_mask"]}
    del segments["attention_mask"]
    assert same(record_routing(model, traced_batches([segments])), trace)

    packed = {**segments, "segment_ids": 2 * segments["segment_ids"]}
    unlabelled = {"input_ids": batch["input_ids"]}
    for refused in (packed, unlabelled):
        with pytest.raises(DataError, match="needs labels, and one example in each row"):
            record_routing(model, [TracedBatch(refused, range(6), [""] * 6)])
    with pytest.raises(DataError, match="nothing to trace"):
        record_routing(model, [])


def test_each_part_gets_its_own_mode_back_and_an_error_leaves_none_in_evaluation():
    model = build_model().train()
    model.model.encoder.eval()
    modes = [part.training for part in model.modules()]
    state = torch.get_rng_state()
    record_routing(model, traced_batches(BATCHES))
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)

    model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record_routing(model, traced_batches(BATCHES))
    assert [part.training for part in model.modules()] == modes


def test_under_autocast_what_is_recorded_keeps_its_precision_and_may_have_a_gradient():
    with torch.autocast("cpu", torch.bfloat16):
        trace = record_routing(build_model(), traced_batches(BATCHES), num_best=3)
    for layer in trace.layers:
        assert (layer.gate.dtype, layer.best_prob.dtype) == (torch.float32, torch.float16)
        assert not any(values.is_inference() for values in (layer.gate, *layer.stats))


# ---------------------------------------------------------------------------
# Files


def test_a_file_holds_what_is_recorded_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("moe.tracing.trace_file.GROUP_ROWS", 60)  # several row groups
    model, options = build_model(), {"num_best": 2, "provenance": Provenance("random")}
    batches = [*traced_batches(BATCHES, "x"), *traced_batches(BATCHES, "y")]
    trace = record_routing(model, batches, **options)
    record_to_folder(model, batches, tmp_path / "trace", **options)
    assert same(read_trace(tmp_path / "trace"), trace)
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [SUMS_FILE, TRACE_FILE]

    # Another library reads a row for each token, with a column for each layer.
    table = pandas.read_parquet(tmp_path / "trace" / TRACE_FILE)
    of_encoder = table[table["stack"] == "encoder"]
    assert of_encoder["token"].tolist() == trace.encoder.ids.tolist()
    assert of_encoder["domain"].value_counts().to_dict() == {"x": 93, "y": 93}
    first = [choice["first"] for choice in of_encoder["encoder.1"]]
    assert first == trace.encoder.layers[1].first.tolist()
    assert table[table["stack"] == "decoder"]["encoder.1"].isna().all()

    # An earlier trace is replaced, whole.
    record_to_folder(model, traced_batches(BATCHES[:1]), tmp_path / "trace")
    assert read_trace(tmp_path / "trace").facts.num_examples == 6


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
    with pytest.raises(DataError, match="nothing to trace"):
        record_to_folder(model, [], folder)
    assert same(read_trace(folder), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_a_trace_of_format_1_is_read(tmp_path):
    trace = record_routing(build_model(), traced_batches(BATCHES, "x"), num_best=2)
    tensors = {"document": trace.document, "domain": trace.domain}
    for stack in STACKS:
        part = trace.stack(stack)
        tensors |= {f"{stack}.ids": part.ids.short(), f"{stack}.starts": part.starts}
        for layer in part.layers:
            prefix = f"{stack}.{layer.facts.layer}"
            tensors |= {f"{prefix}.{name}": getattr(layer, name) for name in CHOICES}
            stats = layer.stats._asdict()
            tensors |= {f"{prefix}.stats.{name}": value for name, value in stats.items()}
    tensors["decoder.targets"] = trace.decoder.targets.short()
    save_file(tensors, tmp_path / "trace.safetensors")
    old_facts = trace.facts._replace(version=1)
    (tmp_path / "trace.json").write_text(json.dumps(to_json(old_facts)))
    assert same(read_trace(tmp_path), trace._replace(facts=old_facts))

    (tmp_path / "trace.json").write_text(json.dumps(to_json(trace.facts)))
    with pytest.raises(DataError, match="format is 2"):
        read_trace(tmp_path)


def test_damage_is_named(tmp_path):
    folder = tmp_path / "trace"
    record_to_folder(build_model(), traced_batches(BATCHES), folder)
    path = folder / TRACE_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\xff")
    with pytest.raises(DataError, match=r"trace\.parquet is damaged.*Record it again"):
        read_trace(folder)

    # A file of another program has no checksums.
    (folder / SUMS_FILE).unlink()
    table = pq.ParquetFile(pa.BufferReader(whole)).read()
    stack = pa.array(["encoder"] * len(table))
    pq.write_table(table.set_column(table.column_names.index("stack"), "stack", stack), path)
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(folder)
    with pytest.raises(DataError, match="is not a trace"):
        read_trace(tmp_path)


def test_a_trace_names_no_expert_that_its_layer_lacks():
    recording = Recording(build_model())
    (rows,) = map(recording.record, traced_batches(BATCHES[:1]))
    rows["encoder.0.first"].fill_(E)
    with pytest.raises(ValueError, match=r"encoder\.0\.first names an expert beyond 3"):
        trace_from(recording.facts(Provenance()), rows, recording.stats)


def test_experts_have_the_smallest_numbers_that_hold_them():
    for number, dtype in ((128, torch.int8), (129, torch.int16)):
        assert expert_dtype(number) == dtype
        trace = record_routing(build_model(num_experts=number), traced_batches(BATCHES[:1]))
        assert trace.encoder.layers[0].first.dtype == dtype
