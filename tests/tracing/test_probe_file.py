"""Probes on disk: what is written is what is read, and nothing that is not comparable is mixed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe import DataError
from moe.tracing.probe_file import (
    Probe,
    begin_probes,
    probe_facts,
    probe_text,
    read_probe_text,
    read_probes,
    write_probe,
)
from moe.tracing.recorder import record_routing, traced_batches
from tests.models.tiny import tiny_batch, tiny_model

MODEL = tiny_model()
BATCHES = [tiny_batch(seed=seed) for seed in (3, 5)]
TEXT = probe_text(MODEL, BATCHES)
FACTS = probe_facts(MODEL, TEXT, "two batches")


def random_probe(step):
    generator = torch.Generator().manual_seed(step)
    choices = {}
    for layer in FACTS.layers:
        shape = (FACTS.num_tokens[layer.stack], layer.num_choices)
        values = torch.randint(-1, layer.num_experts, shape, generator=generator)
        choices[layer.stack, layer.layer] = values.sort(dim=1, descending=True).values.to(
            torch.int8
        )
    return Probe(step, choices)


@pytest.fixture
def folder(tmp_path):
    begin_probes(tmp_path / "probe", FACTS, TEXT, 0)
    for step in (0, 100, 99_999_999):
        write_probe(tmp_path / "probe", random_probe(step), FACTS)
    return tmp_path / "probe"


def assert_same_probes(ours, theirs):
    assert [probe.step for probe in ours] == [probe.step for probe in theirs]
    for probe, other in zip(ours, theirs, strict=True):
        assert probe.choices.keys() == other.choices.keys()
        for key, choices in probe.choices.items():
            assert torch.equal(choices, other.choices[key])
            assert choices.dtype == other.choices[key].dtype


def test_probes_are_read_as_they_were_written_in_the_order_of_their_steps(folder):
    assert_same_probes(read_probes(folder), [random_probe(step) for step in (0, 100, 99_999_999)])


def test_the_text_is_what_a_trace_of_the_batches_holds(folder):
    trace = record_routing(MODEL, traced_batches(BATCHES))
    text = read_probe_text(folder)
    for stack in ("encoder", "decoder"):
        ours, theirs = text.stack(stack), trace.stack(stack)
        for name in ("ids", "targets", "starts", "example", "position"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (stack, name)


def test_columns_that_no_token_needs_take_no_room_and_come_back(tmp_path):
    begin_probes(tmp_path, FACTS, TEXT, 0)
    probe = random_probe(7)
    probe.choices["encoder", 0][:, 1:] = -1
    write_probe(tmp_path, probe, FACTS)
    assert load_file(tmp_path / "step_00000007.safetensors")["encoder.0.choices"].shape[1] == 1
    assert_same_probes(read_probes(tmp_path), [probe])

    probe.choices["encoder", 0][:] = -1
    write_probe(tmp_path, probe, FACTS)
    assert_same_probes(read_probes(tmp_path), [probe])


def test_a_run_that_goes_on_keeps_what_it_has_behind_it_and_one_that_begins_keeps_nothing(folder):
    (folder / "step_by_hand.safetensors").write_text("of the user")
    begin_probes(folder, FACTS, TEXT, 100)
    assert [probe.step for probe in read_probes(folder)] == [0, 100]
    begin_probes(folder, FACTS, TEXT, 0)
    with pytest.raises(DataError, match="holds no probe yet"):
        read_probes(folder)
    assert (folder / "step_by_hand.safetensors").exists()


def test_probes_of_another_text_or_model_are_not_continued_and_stay(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other_text = probe_text(MODEL, BATCHES[:1])
    other_model = tiny_model(num_experts=11)
    for facts, text in (
        (probe_facts(MODEL, other_text, "one batch"), other_text),
        (probe_facts(other_model, TEXT, "two batches"), TEXT),
    ):
        with pytest.raises(DataError, match="holds probes of a different text or different layers"):
            begin_probes(folder, facts, text, 100)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_damaged_probe_is_named(folder):
    path = folder / "step_00000100.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    name, metadata = "decoder.0.choices", {"text_fingerprint": FACTS.text_fingerprint}

    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"step_00000100.*cannot be read"):
        read_probes(folder)
    save_file(tensors, path, metadata={"text_fingerprint": "0" * 64})
    with pytest.raises(DataError, match=r"step_00000100.* a different text than probe.json"):
        read_probes(folder)
    for expert in (7, -2):
        wrong = tensors[name].clone()
        wrong[3, 0] = expert
        save_file({**tensors, name: wrong}, path, metadata=metadata)
        with pytest.raises(DataError, match=r"at most 2 of 7 experts for each of 76 tokens"):
            read_probes(folder)
    del tensors[name]
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(DataError, match=r"step_00000100.*has no tensor decoder.0.choices"):
        read_probes(folder)


@pytest.mark.parametrize("read", [read_probe_text, read_probes])
def test_a_damaged_text_or_none_is_named(folder, tmp_path, read):
    content = (folder / "text.safetensors").read_bytes()
    (folder / "text.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    with pytest.raises(
        DataError, match=r"text\.safetensors does not hold the text of .*probe\.json"
    ):
        read(folder)
    (folder / "text.safetensors").unlink()
    with pytest.raises(DataError, match=r"text\.safetensors cannot be read"):
        read(folder)

    facts = json.loads((folder / "probe.json").read_text())
    (folder / "probe.json").write_text(json.dumps({**facts, "version": 2}))
    with pytest.raises(DataError, match=r"probe\.json: the format is 2; this version .* reads 1"):
        read_probes(folder)
    with pytest.raises(DataError, match=r"holds no probes: .* training\.probe_every"):
        read_probes(tmp_path)
