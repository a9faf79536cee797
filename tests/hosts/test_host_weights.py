"""Checkpoints of hosts read tensor by tensor: converted, quantized, mapped and planned."""

import filecmp
import json

import pytest
import torch
from peft import get_peft_model
from safetensors import safe_open

from moe import CheckpointError, ConfigError, lora_config
from moe.checkpoint.loading import HOST_CLASSES, empty_model, load_model
from moe.commands import convert as convert_command
from moe.commands import plan as plan_command
from moe.commands import quantize as quantize_command
from moe.convert.formats import convert_checkpoint
from moe.convert.host_weights import HOST_FORMATS, HostFormat
from moe.convert.weight_map import WeightMapping
from moe.kernels.quantized_weight import Quantization, QuantizedWeight
from moe.planning.checkpoint import checkpoint_needs
from moe.planning.table import show_bytes
from moe.surgery.quantize import quantize_checkpoint
from tests.hosts.tiny_hosts import dense_host, experts_of, host_batch, sparse_host
from tests.largest_tensor import LargestFloats
from tests.serving.test_mapped import wide_model


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A checkpoint of a library with other names and one tensor for each expert; and the model it is."""
    model = sparse_host("t5gemma", differ=True)
    fields = model.config.to_dict()

    def weight_map(config):
        mappings = []
        for name, weight in empty_model(config).state_dict().items():
            parts = (f"their.{name}",)
            if weight.dim() == 3:
                parts = tuple(f"their.{name}.{number}" for number in range(len(weight)))
            mappings.append(WeightMapping(name, parts, len(weight) if weight.dim() == 3 else 0))
        return mappings

    monkeypatch.setitem(HOST_FORMATS, "theirs", HostFormat(lambda raw, names: fields, weight_map))
    monkeypatch.setitem(HOST_CLASSES, "theirs", type(model))
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "theirs"}')
    (folder / "generation_config.json").write_text('{"max_new_tokens": 5}')
    index = {}
    weights = model.state_dict()
    for mapping in weight_map(model.config):
        file = f"pytorch_model-{len(index) // 30 + 1:05}.bin"
        index |= dict.fromkeys(mapping.parts, file)
    for file in set(index.values()):
        parts = {}
        for mapping in weight_map(model.config):
            pieces = mapping.split(weights[mapping.name])
            parts |= {name: piece.clone() for name, piece in pieces.items() if index[name] == file}
        torch.save(parts, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder, model


KINDS = ["marian", "mbart", "t5gemma", "t5gemma2"]  # they tie their weights differently
each_host = pytest.mark.parametrize("name", KINDS)


def convert(source, target, **settings):
    target.mkdir()
    return convert_checkpoint(source, target, **settings)


def assert_same_weights(one, other, dtype=torch.float32):
    weights = other.state_dict()
    for name, weight in one.state_dict().items():
        assert torch.equal(weight.to(dtype), weights.pop(name)), name
    assert not weights


@each_host
@pytest.mark.parametrize("make", [dense_host, sparse_host])
def test_a_rewritten_host_is_the_same_in_fewer_files(name, make, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    report = convert(tmp_path / "shards", tmp_path / "one", dtype=torch.bfloat16)
    assert not report.ignored
    with safe_open(tmp_path / "one/model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(report.mapped)
    assert_same_weights(model, load_model(tmp_path / "one"), torch.bfloat16)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_a_host_are_merged(tmp_path):
    sparse_host("m2m_100", differ=True).save_pretrained(tmp_path / "base")
    base = load_model(tmp_path / "base")
    adapted = get_peft_model(base, lora_config(base, rank=3)).eval()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(tmp_path / "adapters")
    base.config.save_pretrained(tmp_path / "adapters")
    convert(tmp_path / "adapters", tmp_path / "merged")
    batch = host_batch("m2m_100")
    merged = load_model(tmp_path / "merged")(**batch).logits
    torch.testing.assert_close(merged, adapted(**batch).logits, rtol=1e-4, atol=1e-4)


def test_copies_of_a_tied_weight_count_once_and_must_be_copies(tmp_path):
    model = sparse_host("t5gemma")
    model.config.save_pretrained(tmp_path / "host")
    state = model.state_dict()
    torch.save(state, tmp_path / "host/pytorch_model.bin")
    report = convert(tmp_path / "host", tmp_path / "out")
    assert report.ignored == {
        "lm_head.out_proj.weight": "is a copy of model.decoder.embed_tokens.weight"
    }
    assert_same_weights(model, load_model(tmp_path / "out"))

    state["lm_head.out_proj.weight"] = 2 * state["lm_head.out_proj.weight"]
    torch.save(state, tmp_path / "host/pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"1 unexpected: lm_head.out_proj.weight"):
        convert(tmp_path / "host", tmp_path / "untied")


def test_a_registered_format_is_loaded_and_converted_from_pickled_shards(library, tmp_path):
    folder, model = library
    report = convert(folder, tmp_path / "out")
    assert len(report.mapped) == len(dict(model.named_parameters()))
    for copy in (
        load_model(tmp_path / "out"),
        load_model(folder),
        load_model(folder, dropless=True),
    ):
        assert type(copy) is type(model) and copy.generation_config.max_new_tokens == 5
        assert_same_weights(model, copy)
    assert load_model(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_damaged_shards_are_named_and_nothing_is_written(library, tmp_path):
    folder, _ = library
    shard = sorted(folder.glob("*.bin"))[1]
    (tmp_path / shard.name).write_bytes(shard.read_bytes())
    index = folder / "pytorch_model.bin.index.json"
    tensors = torch.load(shard)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    weight = tensors.pop(name)
    saved = {
        f"1 missing: {name}": tensors,
        rf"{name} \(1,\) instead of": {**tensors, name: torch.ones(1)},
        f"{name} torch.int64 instead of": {**tensors, name: weight.long()},
        "numbers that are not finite": {**tensors, name: weight / 0},
        "could run code": {"a": print},
    }

    def assert_refused(message):
        for command in (convert_command, quantize_command):
            with pytest.raises(CheckpointError, match=message) as caught:
                command.main(["--from", str(folder), "--to", str(tmp_path / "out")])
            assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()

    for message, content in saved.items():
        torch.save(content, shard)
        assert_refused(message)
    shard.write_bytes((tmp_path / shard.name).read_bytes()[:-100])
    assert_refused(shard.name)
    shard.rename(folder / "renamed.bin")
    assert_refused(f"{shard.name} is missing")
    index.write_text(index.read_text().replace(shard.name, f"../{shard.name}"))
    assert_refused("is not in .* but its index lists it")


def test_hosts_have_neither_the_format_nor_the_settings_of_others(tmp_path):
    dense_host("t5gemma").save_pretrained(tmp_path / "host")
    arguments = ["--from", str(tmp_path / "host"), "--to", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="format of a host"):
        convert_command.main([*arguments, "--format", "t5"])
    with pytest.raises(ConfigError, match=r"Settings of a t5gemma .*num_experts"):
        convert_command.main([*arguments, "--set", "num_experts=3"])
    assert not (tmp_path / "out").exists()
    sparse_host("t5gemma").save_pretrained(tmp_path / "sparse")
    model = convert(tmp_path / "sparse", tmp_path / "wide", eval_capacity_factor=3.0)
    model = load_model(tmp_path / "wide")
    assert model.settings.layer["eval_capacity_factor"] == 3
    with pytest.raises(ConfigError, match="num_expert"):
        convert(tmp_path / "sparse", tmp_path / "no", num_expert=3)


@each_host
@pytest.mark.parametrize("options", [["--bits", 8], ["--bits", 4, "--group-size", 2], ["--all"]])
def test_a_quantized_host_computes_as_its_dequantized_one(name, options, tmp_path, capsys):
    model = sparse_host(name, differ=True)
    model.save_pretrained(tmp_path / "float", max_shard_size="10KB")
    arguments = ["--from", tmp_path / "float", "--to", tmp_path / "small", *options]
    quantize_command.main([str(argument) for argument in arguments])
    convert(tmp_path / "small", tmp_path / "dequantized")
    small, plain = load_model(tmp_path / "small"), load_model(tmp_path / "dequantized")
    experts = [weight for weight in small.parameters() if isinstance(weight, QuantizedWeight)]
    assert len(experts) == (0 if options == ["--all"] else 4)
    assert not any(weight.requires_grad for weight in experts)

    batch = {"input_ids": torch.arange(4, 30)[None], "labels": torch.arange(5, 18)[None]}
    logits = [each(**batch).logits for each in (model, plain, small)]
    torch.testing.assert_close(logits[2], logits[1], rtol=1e-5, atol=1e-5)
    assert 0 < (logits[1] - logits[0]).norm() < 0.2 * logits[0].norm()
    small.save_pretrained(tmp_path / "again")
    assert torch.equal(load_model(tmp_path / "again")(**batch).logits, logits[2])
    inputs = batch["input_ids"]
    answers = [each.generate(inputs, max_new_tokens=7) for each in (small, plain)]
    assert torch.equal(*answers)


def test_one_expert_of_a_library_is_in_memory_while_it_is_converted_or_quantized(library, tmp_path):
    folder, model = library
    for name in ("eight", "two"):
        (tmp_path / name).mkdir()
    with LargestFloats() as largest:
        quantize_checkpoint(folder, tmp_path / "eight", Quantization(8))
        convert(folder, tmp_path / "float")
    assert largest.numel < max(weight.numel() for weight in experts_of(model))
    quantize_checkpoint(tmp_path / "float", tmp_path / "two", Quantization(8))
    files = [tmp_path / name / "model.safetensors" for name in ("eight", "two")]
    assert filecmp.cmp(*files, shallow=False)


def test_a_dense_host_has_nothing_to_quantize(tmp_path):
    dense_host("t5gemma").save_pretrained(tmp_path / "host")
    for options in ([], ["--all"]):
        with pytest.raises(ConfigError, match="no experts to quantize"):
            quantize_command.main(
                ["--from", str(tmp_path / "host"), "--to", str(tmp_path / "out"), *options]
            )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_plan_of_a_model_is_the_bytes_of_its_files(bits, tmp_path):
    model = sparse_host("m2m_100") if bits == 8 else wide_model("host")
    model.save_pretrained(tmp_path / "float")
    (tmp_path / "small").mkdir()
    quantize_checkpoint(
        tmp_path / "float", tmp_path / "small", Quantization(bits, {4: 32}.get(bits))
    )
    for folder, planned in (("float", None), ("small", bits)):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
        needs = checkpoint_needs(model.config, torch.float32, bits=planned)
        assert needs.experts + needs.rest == stored
        num_experts = 5 if bits == 8 else 37
        assert needs.experts_of_token * num_experts == needs.experts * 2


def test_nllb_moe_is_planned_from_its_config(tmp_path, capsys):
    config = {"model_type": "nllb-moe", "vocab_size": 256206, "d_model": 2048}
    for stack in ("encoder", "decoder"):
        config |= {f"{stack}_layers": 24, f"{stack}_ffn_dim": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan_command.main(["--from", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "54,500,569,088 parameters" in printed
    assert show_bytes(4 * 54_500_569_088) in printed
    experts = 12 * 128 * 33_564_672  # 134 MB each
    assert show_bytes(4 * (54_500_569_088 - experts)) in printed
    assert show_bytes(4 * (54_500_569_088 - experts * 126 // 128)) in printed
    with pytest.raises(ConfigError, match="--memory"):
        plan_command.main(["--from", str(tmp_path), "--memory", "80GiB"])
