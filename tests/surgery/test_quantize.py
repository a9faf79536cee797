"""Experts in 8 and 4 bits. Oracles: the formulas element by element; a float model that holds the
dequantized weights.
"""

import filecmp
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from moe import (
    CheckpointError,
    ConfigError,
    MeshConfig,
    STMoEEncoderModel,
    STMoEForConditionalGeneration,
    lora_config,
)
from moe.checkpoint import load_model, load_model_on_mesh
from moe.commands import quantize as command
from moe.convert.formats import convert_checkpoint, open_checkpoint
from moe.kernels.quantized_weight import Quantization, QuantizedWeight, quantize
from moe.models import select_parameters
from moe.models.parallelize import model_layouts
from moe.surgery.quantize import quantize_checkpoint
from tests.largest_tensor import LargestFloats
from tests.models.tiny import DENSE, tiny_batch, tiny_model

E, D, F = 7, 32, 64
SIZES = {"d_model": D, "d_ff": F, "eval_capacity_factor": None, "num_shared_experts": 1}
EIGHT, FOUR = Quantization(8), Quantization(4, 8)
BITS = pytest.mark.parametrize("quantization", [EIGHT, FOUR], ids=["8", "4"])

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A float model, its quantized models q8 and q4, and these dequantized again: f8 and f4."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(**SIZES).save_pretrained(folder / "float")
    for quantization in (EIGHT, FOUR):
        quantized = folder / f"q{quantization.bits}"
        dequantized = folder / f"f{quantization.bits}"
        quantized.mkdir()
        dequantized.mkdir()
        quantize_checkpoint(folder / "float", quantized, quantization)
        convert_checkpoint(quantized, dequantized)
    return folder


def load(folder, **options):
    return STMoEForConditionalGeneration.from_pretrained(folder, **options).eval()


def logits(model, **changes):
    with torch.no_grad():
        return model(**{**tiny_batch(), **changes}).logits


def expert_weights(model):
    named = model.named_parameters()
    return {name: p for name, p in named if ".experts." in name and name.endswith("_proj")}


# ---- numbers ----


@BITS
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=48, max_size=48), st.sampled_from([0.0, 1.0])
)
def test_quantizing_what_was_quantized_changes_no_code(quantization, numbers, spread):
    noise = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor(numbers).reshape(3, 16) * 1e-3 + spread * noise
    once = quantize(weight, quantization)
    twice = quantize(once.dequantize(), quantization)
    assert torch.equal(once.qdata, twice.qdata)
    torch.testing.assert_close(once.dequantize(), twice.dequantize(), rtol=1e-5, atol=1e-6)


def test_codes_are_those_of_the_formulas_and_the_first_of_a_byte_is_the_low_half():
    weight = torch.tensor([[-1.0, 0.0, 1.0, 2.0, 7.0, 7.0, 7.0, 7.0]])
    eight = quantize(weight, EIGHT)
    assert eight.scale.item() == pytest.approx(7 / 127)
    assert eight.qdata.tolist() == [[-18, 0, 18, 36, 127, 127, 127, 127]]

    # A group of -1 to 2: s = 0.2, z = 0.6. A group of equal numbers: s = 0, z = 7.
    four = quantize(weight, Quantization(4, 4))
    torch.testing.assert_close(four.scale, torch.tensor([[0.2, 0.0]]))
    torch.testing.assert_close(four.zero, torch.tensor([[0.6, 7.0]]))
    assert four.qdata.tolist() == [[0 + 16 * 5, 10 + 16 * 15, 8 + 16 * 8, 8 + 16 * 8]]
    torch.testing.assert_close(four.dequantize(), weight, rtol=0, atol=1e-6)
    assert not quantize(torch.zeros(3, 8), EIGHT).dequantize().any()


@BITS
def test_a_quantized_weight_is_a_constant_that_other_operations_see_dequantized(quantization):
    weight = quantize(torch.randn(E, D, F), quantization)
    plain = weight.dequantize()
    with torch.inference_mode():
        assert isinstance(weight[3], QuantizedWeight)
    assert torch.equal(weight[3].dequantize(), plain[3])
    assert torch.equal(torch.stack([weight, weight])[1] + 1, plain + 1)
    x = torch.randn(5, F, requires_grad=True)
    (x @ weight[2].t()).sum().backward()
    torch.testing.assert_close(x.grad, plain[2].sum(0).expand(5, F))
    half = weight.to(torch.bfloat16)
    assert isinstance(half, QuantizedWeight) and torch.equal(half.qdata, weight.qdata)
    assert torch.equal(torch.empty(E, D, F).copy_(weight), plain)
    with pytest.raises(RuntimeError, match=r"zero_.* would change a quantized weight"):
        weight.zero_()
    with pytest.raises(RuntimeError, match="would change a quantized weight"):
        torch._foreach_mul_([weight], 2)


@pytest.mark.parametrize("quantization", [EIGHT, Quantization(4, 32)], ids=["8", "4"])
def test_few_rows_in_bfloat16_are_multiplied_packed_and_others_are_not(quantization):
    weight = quantize(torch.randn(3, 64, 96, dtype=torch.bfloat16), quantization)
    wide = quantize(weight.dequantize().float(), quantization)
    few = torch.randn(16, 96, dtype=torch.bfloat16)
    for expert in (2, 0, 2):
        product = weight.multiply_packed(few, expert)
        expected = few.float() @ weight[expert].dequantize().float().t()
        torch.testing.assert_close(product.float(), expected, rtol=2**-6, atol=2**-3)
    assert weight.multiply_packed(torch.cat([few, few]), 2) is None
    assert wide.multiply_packed(few.float(), 2) is None

    # Other numbers are packed again.
    weight.detach().copy_(quantize(torch.randn(3, 64, 96).bfloat16(), quantization))
    expected = few.float() @ weight[2].dequantize().float().t()
    product = weight.multiply_packed(few, 2)
    torch.testing.assert_close(product.float(), expected, rtol=2**-6, atol=2**-3)

    # Any address, as in a mapped file.
    moved = [
        torch.empty(1 + part.numel(), dtype=part.dtype)[1:].view(part.shape).copy_(part)
        for part in weight.parts().values()
    ]
    assert torch.equal(QuantizedWeight(*moved).multiply_packed(few, 2), product)

    # Sizes that are no whole blocks would read past the end.
    odd = quantize(torch.randn(3, 64, 40).bfloat16(), Quantization(quantization.bits, 8))
    assert odd.multiply_packed(few[:, :40], 2) is None


# ---- models ----


@BITS
def test_a_quantized_model_computes_and_answers_as_its_dequantized_one(quantization, folder):
    quantized = load(folder / f"q{quantization.bits}")
    plain = load(folder / f"f{quantization.bits}")
    assert all(isinstance(p, QuantizedWeight) for p in expert_weights(quantized).values())
    for name, weight in expert_weights(quantized).items():
        assert torch.equal(weight.dequantize(), plain.get_parameter(name))
    torch.testing.assert_close(logits(quantized), logits(plain), rtol=1e-5, atol=1e-5)
    one = {"input_ids": torch.tensor([[5]]), "attention_mask": None, "labels": torch.tensor([[7]])}
    torch.testing.assert_close(logits(quantized, **one), logits(plain, **one), rtol=1e-5, atol=1e-5)
    half = load(folder / f"q{quantization.bits}", dtype=torch.bfloat16)
    assert all(weight.scale.dtype == torch.bfloat16 for weight in expert_weights(half).values())
    for changes in ({}, one):
        wide = logits(plain, **changes)
        assert (logits(half, **changes).float() - wide).norm() < 0.03 * wide.norm()
    inputs = tiny_batch()["input_ids"]
    answers = [model.generate(inputs, max_new_tokens=7) for model in (quantized, plain)]
    assert torch.equal(*answers)

    # The rest is that of the model before, and the experts are a few per cent off.
    before = load(folder / "float")
    assert quantized.num_parameters() == before.num_parameters()
    error = (logits(quantized) - logits(before)).norm() / logits(before).norm()
    assert 0 < error < {8: 0.01, 4: 0.1}[quantization.bits]
    static = load(folder / f"q{quantization.bits}", dispatch="static")
    torch.testing.assert_close(logits(static), logits(plain), rtol=1e-4, atol=1e-4)


@BITS
def test_saving_what_was_loaded_writes_the_same_file(quantization, folder, tmp_path):
    source = folder / f"q{quantization.bits}"
    model, info = STMoEForConditionalGeneration.from_pretrained(source, output_loading_info=True)
    assert not any(info.values())
    model.save_pretrained(tmp_path)
    assert filecmp.cmp(source / "model.safetensors", tmp_path / "model.safetensors", shallow=False)
    assert torch.equal(logits(load(tmp_path)), logits(model))
    assert (
        model.config.expert_quantization
        == json.loads((tmp_path / "config.json").read_text())["expert_quantization"]
    )


def test_loading_makes_no_float_copy_of_experts(folder):
    with LargestFloats() as mode:
        load(folder / "q4")
    assert mode.numel < E * D * F


@BITS
def test_a_new_model_is_quantized_and_takes_the_weights_of_another(quantization):
    fields = {name: value for name, value in quantization._asdict().items() if value}
    model, other = (tiny_model(seed, **SIZES, expert_quantization=fields) for seed in (0, 1))
    first = next(iter(expert_weights(model).values()))
    assert isinstance(first, QuantizedWeight) and first.dequantize().std() > 0
    expected = logits(model)
    assert not torch.equal(logits(other), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), expected)


@pytest.mark.slow
def test_a_quantized_model_compiles(folder):
    model = load(folder / "q4")
    expected = logits(model)
    torch.testing.assert_close(logits(torch.compile(model, backend="eager")), expected)


# ---- a whole model in 8 bits ----


@pytest.fixture(scope="module")
def whole(folder):
    """The float model with every matrix in 8 bits, by the command."""
    target = folder / "whole"
    command.main(["--from", str(folder / "float"), "--to", str(target), "--all"])
    return target


def test_a_whole_model_in_8_bits_is_the_float_model_with_rounded_rows(folder, whole):
    stored = load_file(whole / "model.safetensors")
    kept = {name for name in stored if not name.endswith(("_q", "_scale"))}
    small = ("norm.weight", "position_bias.table", "router.gate")
    assert kept and all(name.endswith(small) for name in kept)

    expected = load(folder / "float")
    for name, weight in expected.named_parameters():
        if name not in kept:
            codes, scale = stored[f"{name}_q"], stored[f"{name}_scale"]
            assert codes.dtype == torch.int8 and codes.shape == weight.shape
            assert scale.shape == (*weight.shape[:-1], 1)
            torch.testing.assert_close(scale[..., 0], weight.detach().abs().amax(-1) / 127)
            weight.data = (weight.detach() / scale).round() * scale
    model = load(whole)
    assert model.config.expert_quantization is None
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-5, atol=1e-5)


def test_a_model_read_from_8_bits_trains_saves_and_converts_as_floats(folder, whole, tmp_path):
    model = load(whole)
    model(**tiny_batch()).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "_proj" in name)
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "converted").mkdir()
    convert_checkpoint(whole, tmp_path / "converted")
    for other in (load(tmp_path / "saved"), load(tmp_path / "converted")):
        assert torch.equal(logits(other), logits(model))
    mapped = load_model(whole, mmap=True)  # products round by the address of a weight
    torch.testing.assert_close(logits(mapped), logits(model), rtol=1e-5, atol=1e-5)
    assert "model.encoder.embed_tokens.weight" in load_file(tmp_path / "saved/model.safetensors")

    # Encoder alone, and a dense model, which has no experts.
    encoder = STMoEEncoderModel.from_pretrained(whole)
    assert torch.equal(encoder.get_input_embeddings().weight, model.get_input_embeddings().weight)
    tiny_model(**DENSE).save_pretrained(tmp_path / "dense")
    (tmp_path / "dense8").mkdir()
    quantize_checkpoint(tmp_path / "dense", tmp_path / "dense8", EIGHT, whole=True)
    torch.testing.assert_close(
        logits(load(tmp_path / "dense8")), logits(load(tmp_path / "dense")), rtol=0.1, atol=0.1
    )
    with pytest.raises(ConfigError, match=r"--all cannot be combined with --bits 4"):
        command.main(["--from", "x", "--to", "y", "--all", "--bits", "4"])


# ---- adapters ----


@BITS
def test_adapters_train_and_leave_quantized_experts_as_they_are(quantization, folder, tmp_path):
    base = load(folder / f"q{quantization.bits}")
    before = {name: weight.qdata.clone() for name, weight in expert_weights(base).items()}
    expected = logits(base)
    model = get_peft_model(base, lora_config(base, rank=3, attention=False))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)

    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    model.train()
    for _ in range(5):
        loss = model(**tiny_batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    assert losses[-1] < 0.8 * losses[0]
    after = [p for p in model.parameters() if isinstance(p, QuantizedWeight)]
    assert all(
        torch.equal(*pair) for pair in zip(before.values(), (p.qdata for p in after), strict=True)
    )

    # The adapters load beside the quantized experts, and merge with the same as floats.
    model.save_pretrained(tmp_path)
    trained = logits(model)
    loaded = PeftModel.from_pretrained(load(folder / f"q{quantization.bits}"), tmp_path).eval()
    assert torch.equal(logits(loaded), trained)
    plain = PeftModel.from_pretrained(load(folder / f"f{quantization.bits}"), tmp_path)
    merged = plain.merge_and_unload().eval()
    torch.testing.assert_close(logits(merged), trained, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="would change a quantized weight"):
        loaded.merge_and_unload()


def test_gradients_flow_through_frozen_quantized_experts_as_through_float_ones(folder):
    gradients = []
    for name in ("q4", "f4"):
        model = load(folder / name)
        select_parameters(model, "non_moe")
        model(**tiny_batch()).loss.backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


# ---- refusals ----


def test_what_quantized_experts_cannot_do_is_refused(folder, tmp_path):
    model = load(folder / "q8")
    for subset in ("all", "moe", "router_frozen"):
        with pytest.raises(ConfigError, match=rf"{subset!r} trains experts.* 8 bits"):
            select_parameters(model, subset)
    with pytest.raises(ConfigError, match=r"8 bits.*stmoe convert --from"):
        open_checkpoint(folder / "q8")
    with pytest.raises(ConfigError, match="8 bits"):
        quantize_checkpoint(folder / "q8", tmp_path, FOUR)
    with pytest.raises(ConfigError, match=r"8 bits.*sharded over ranks"):
        model_layouts(model, model.config, MeshConfig(ep=2))
    two = SimpleNamespace(config=MeshConfig(ep=2))
    with pytest.raises(ConfigError, match=r"8 bits.*sharded over ranks"):
        load_model_on_mesh(folder / "q8", two)
    one, layouts = load_model_on_mesh(folder / "q8", SimpleNamespace(config=MeshConfig()))
    assert torch.equal(logits(one), logits(model)) and not layouts

    for weight in expert_weights(model).values():
        weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"requires a gradient.*lora_config"):
        model(**tiny_batch())


def test_models_and_settings_that_cannot_be_quantized_are_refused(folder, tmp_path):
    tiny_model(**DENSE).save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match="no experts to quantize"):
        quantize_checkpoint(tmp_path / "dense", tmp_path, EIGHT)
    with pytest.raises(
        ConfigError, match=r"'group_size': 12\}; expected .* even divisor of d_model"
    ):
        quantize_checkpoint(folder / "float", tmp_path, Quantization(4, 12))

    # A file without scales, and one without a weight.
    shutil.copytree(folder / "q8", tmp_path / "torn")
    stored = load_file(folder / "q8/model.safetensors")
    del stored[next(name for name in stored if name.endswith("experts.down_proj_scale"))]
    (tmp_path / "torn/SHA256SUMS").unlink()
    save_file(stored, tmp_path / "torn/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no .*down_proj_scale"):
        load(tmp_path / "torn")
    config = load(folder / "q8").config
    config.save_pretrained(folder / "float8")
    shutil.copy(folder / "float/model.safetensors", folder / "float8/model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no .*_proj_q"):
        load(folder / "float8")


# ---- the command ----


def test_the_command_writes_a_model_and_its_report(folder, tmp_path, capsys):
    arguments = ["--from", str(folder / "float"), "--to", str(tmp_path / "new"), "--bits", "4"]
    command.main([*arguments, "--group-size", "8"])
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "new/surgery.json").read_text())
    sizes = {name: (before, after) for name, before, after in report["sizes"]}
    before, after = sizes["bytes of weights"]
    assert after < before and f"{after:,}" in printed
    assert torch.equal(logits(load(tmp_path / "new")), logits(load(folder / "q4")))
    with pytest.raises(ConfigError, match="--group-size 8 has no effect with --bits 8"):
        command.main(["--from", "x", "--to", "y", "--group-size", "8"])
