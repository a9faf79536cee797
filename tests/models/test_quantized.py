"""Quantised models: experts that stay wide are counted, quantised ones compute, and what saves
loads.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.integrations import bitsandbytes
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe import CheckpointError, STMoEForConditionalGeneration, lora_config
from moe.kernels.quantized_weight import Quantization
from moe.models.attention import Projection
from moe.models.model_warnings import warn_of_plain_experts
from moe.models.pretrained import freeze_quantized_experts, refuse_not_finite
from moe.sparse.experts import Experts
from moe.surgery.quantize import quantize_checkpoint
from tests.models.int8 import Int8Weight, PackedInt8Weight
from tests.models.tiny import tiny_batch, tiny_model


def test_experts_that_a_quantiser_left_are_counted(recwarn):
    model = tiny_model()
    warn_of_plain_experts(model)
    assert not recwarn
    model.hf_quantizer = SimpleNamespace()
    quantize_by_hand(model, Int8Weight, {"weight"})
    experts = 2 * 7 * (62 * 29 + 29 * 31)
    total = model.num_parameters()
    message = f"{experts:,} of {total:,}.*parameters .{experts / total:.0%}"
    with pytest.warns(UserWarning, match=message):
        warn_of_plain_experts(model)


def test_quantised_experts_that_transformers_lets_train_are_constants_after_loading():
    model = quantize_by_hand(tiny_model(), Int8Weight, {"gate_up_proj", "down_proj"})
    weights = [layer.experts.down_proj for layer in model.sparse_layers()]
    for weight in weights:
        weight.requires_grad_(True)
    freeze_quantized_experts(model, None)
    model(**tiny_batch()).loss.backward()
    assert not any(weight.requires_grad for weight in weights)
    assert all(layer.router.gate.grad is not None for layer in model.sparse_layers())


def quantize_by_hand(model, kind, names):
    """Puts int8 weights into a model as torchao.quantize_ does; `names` are the ends of names."""
    for module in list(model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            is_expert = isinstance(module, Experts)
            if name in names and (is_expert or isinstance(module, nn.Linear)):
                narrow = nn.Parameter(kind.of(weight), requires_grad=False)
                setattr(module, name, narrow)
    return model


def test_scales_of_quantised_weights_are_checked_for_numbers_that_are_none():
    model = quantize_by_hand(tiny_model(), Int8Weight, {"gate_up_proj"})
    refuse_not_finite(model, "here")
    stacked = model.sparse_layers()[1].experts.gate_up_proj
    stacked.data.scale[3, 5] = torch.nan
    with pytest.raises(CheckpointError, match=r"gate_up_proj in here .* not finite"):
        refuse_not_finite(model, "here")


@torch.no_grad()
def test_an_expert_is_unpacked_alone_and_only_where_it_has_rows():
    names = {"gate_up_proj", "down_proj"}
    one_token = {"input_ids": torch.tensor([[5]]), "decoder_input_ids": torch.tensor([[0]])}
    results = {}
    for kind in (Int8Weight, PackedInt8Weight):
        model = quantize_by_hand(tiny_model(), kind, names)
        kind.unpacked = []
        results[kind] = model(**one_token).logits
    torch.testing.assert_close(*results.values(), rtol=1e-5, atol=1e-5)

    # One token has two experts in each of two layers, and each of those two products.
    assert len(Int8Weight.unpacked) == 2 * 2 * 2
    assert {len(shape) for shape in Int8Weight.unpacked} == {2}
    assert PackedInt8Weight.unpacked == [(7, 62, 29), (7, 29, 31)] * 2


def test_adapters_beside_quantised_experts_have_the_gradients_of_plain_ones():
    gradients = []
    for narrow in (True, False):
        model = quantize_by_hand(tiny_model(), Int8Weight, {"gate_up_proj", "down_proj"})
        for layer in model.sparse_layers():
            for name, weight in list(layer.experts.named_parameters()):
                if not narrow:
                    plain = nn.Parameter(weight.data.dequantize(), requires_grad=False)
                    setattr(layer.experts, name, plain)
        projections = [p for p in model.parameters() if p.requires_grad]
        loss = model(**tiny_batch()).loss
        gradients.append(torch.autograd.grad(loss, projections))
    for narrow, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(narrow, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torchao about itself
def test_a_quantised_model_saves_and_loads_the_same(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    int8 = quantization.Int8WeightOnlyConfig()
    config = TorchAoConfig(quantization.FqnToConfig({"re:.*_proj": int8}))
    model = tiny_model(d_model=32, d_ff=64, eval_capacity_factor=None)
    model.save_pretrained(tmp_path / "wide")
    from_pretrained = STMoEForConditionalGeneration.from_pretrained
    quantised = from_pretrained(tmp_path / "wide", quantization_config=config)
    narrow = 0
    for weight in quantised.parameters():
        if type(weight.data) is not torch.Tensor:
            narrow += weight.numel()
    assert (
        abs(narrow / model.num_parameters() - 0.73) < 0.01
    )  # transformers leaves down projections

    quantised.save_pretrained(tmp_path / "narrow")
    loaded = from_pretrained(tmp_path / "narrow")
    with torch.no_grad():
        wide, a, b = (each(**tiny_batch()).logits for each in (model, quantised, loaded))
    assert torch.equal(a, b)
    assert (a - wide).abs().mean() < 0.03 * wide.abs().mean()


class ReplacedLinear(nn.Linear):
    """Has the constructor of bitsandbytes' linear layers, and returns the dtype of its input."""

    def __init__(self, d_in, d_out, bias, has_fp16_weights, threshold):
        super().__init__(d_in, d_out, bias)

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight.t()).to(x.dtype)


@register_quantization_config("replaced")
class ReplacedConfig(QuantizationConfigMixin):
    llm_int8_has_fp16_weight = False
    llm_int8_threshold = 6.0

    def __init__(self, **_):
        super().__init__("replaced")

    def quantization_method(self):
        return "llm_int8"


@register_quantizer("replaced")
class ReplacingQuantizer(HfQuantizer):
    """Replaces linear layers by transformers' own function for bitsandbytes."""

    is_trainable = True

    def is_serializable(self):
        return True

    def _process_model_before_weight_loading(self, model, **_):
        skipped = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        bitsandbytes.replace_with_bnb_linear(model, skipped, self.quantization_config)


@pytest.fixture
def replaced_config(monkeypatch):
    """Returns the configuration of a quantizer that replaces as bitsandbytes does."""
    fake = SimpleNamespace(nn=SimpleNamespace(Linear8bitLt=ReplacedLinear))
    monkeypatch.setattr(bitsandbytes, "bnb", fake, raising=False)
    return ReplacedConfig()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.filterwarnings("ignore:The stacked experts")
def test_a_quantizer_for_plain_linear_modules_replaces_all_but_heads_and_down_projections(
    tmp_path, replaced_config, dtype
):
    tiny_model().save_pretrained(tmp_path)
    from_pretrained = STMoEForConditionalGeneration.from_pretrained
    plain = from_pretrained(tmp_path, dtype=dtype)
    replaced = from_pretrained(tmp_path, dtype=dtype, quantization_config=replaced_config)

    kinds = {name: type(module) for name, module in replaced.named_modules()}
    for name, module in plain.named_modules():
        if isinstance(module, Projection):
            stays = name == "lm_head" or name.endswith("down_proj")
            assert kinds[name] is (Projection if stays else ReplacedLinear), name
    assert sum(kind is ReplacedLinear for kind in kinds.values()) == 4 * (2 + 2 * 3) + 5

    # The weights are those of the file, so the outputs are too; and later models are as before.
    outputs = [model(**tiny_batch()).logits for model in (plain, replaced)]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)
    assert type(tiny_model().lm_head) is Projection
    assert type(tiny_model().model.decoder.blocks[0].feed_forward.up_proj) is Projection


def test_quantized_experts_beside_replaced_linear_modules_save_and_load_the_same(
    tmp_path, replaced_config, recwarn
):
    tiny_model().save_pretrained(tmp_path / "wide")
    (tmp_path / "experts").mkdir()
    quantize_checkpoint(tmp_path / "wide", tmp_path / "experts", Quantization(8))
    from_pretrained = STMoEForConditionalGeneration.from_pretrained
    model = from_pretrained(tmp_path / "experts", quantization_config=replaced_config)
    model.save_pretrained(tmp_path / "both")
    loaded = from_pretrained(tmp_path / "both")
    assert not [warning for warning in recwarn if "not quantized" in str(warning.message)]
    assert torch.equal(model(**tiny_batch()).logits, loaded(**tiny_batch()).logits)


def test_the_rank_of_adapters_is_compared_with_widths_and_not_with_packed_weights():
    model = tiny_model()
    for module in model.modules():
        if type(module) is Projection:  # as bitsandbytes packs 4 bits
            module.weight = nn.Parameter(torch.zeros(5, 1, dtype=torch.uint8), requires_grad=False)
    assert lora_config(model, experts=False, rank=15).r == 15
