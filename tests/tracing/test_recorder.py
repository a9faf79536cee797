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
from moe.tracing.recorder import Provenance, TracedBatch, record_routing, traced_batches
from moe.tracing.trace import CHOICES, STACKS, expert_dtype, layer_name
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


def rewrite(path, **changes):
    """Rewrites a table with other columns, and without checksums."""
    header = {"stmoe": pq.read_metadata(path).metadata[b"stmoe"]}
    table = pq.read_table(path).replace_schema_metadata(header)
    for name, column in changes.items():
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, path)
    (path.parent / SUMS_FILE).unlink(missing_ok=True)


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


def test_a_million_tokens_fit_into_twenty_megabytes(tmp_path):
    model = build_model(num_sparse_encoder_layers=1)
    sizes = []
    for number in (5, 25):
        record_to_folder(model, traced_batches(BATCHES * number), tmp_path / str(number))
        sizes.append((tmp_path / str(number) / TRACE_FILE).stat().st_size)
    tokens = sum(int((batch["attention_mask"] > 0).sum()) for batch in BATCHES)
    tokens += sum(int((batch["labels"] >= 0).sum()) for batch in BATCHES)
    assert (sizes[1] - sizes[0]) / (20 * tokens) < 20


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
    path.write_bytes(whole)

    expert = pq.read_table(path)["encoder.0"].combine_chunks()
    fields = dict(zip([part.name for part in expert.type], expert.flatten(), strict=True))
    fields["first"] = pa.array([77] * len(expert), pa.int8())
    other = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
    for changes, message in (
        ({"encoder.0": other}, r"encoder\.0\.first names an expert beyond"),
        ({"stack": pa.array(["encoder"] * len(expert))}, "cannot be read"),
    ):
        path.write_bytes(whole)
        rewrite(path, **changes)
        with pytest.raises(DataError, match=message):
            read_trace(folder)

    path.write_bytes(b"\xff" * 40)
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(folder)
    with pytest.raises(DataError, match="is not a trace"):
        read_trace(tmp_path)


def test_experts_have_the_smallest_numbers_that_hold_them():
    assert expert_dtype(128) == torch.int8
    assert expert_dtype(129) == torch.int16
