"""Quantised models: experts that stay wide are counted, quantised ones compute, and what saves
loads.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moe import STMoEForConditionalGeneration
from moe.models.quantized import warn_of_plain_experts
from tests.models.tiny import tiny_batch, tiny_model


def test_experts_that_a_quantiser_left_are_counted(recwarn):
    model = tiny_model()
    warn_of_plain_experts(model)
    assert not recwarn
    model.hf_quantizer = SimpleNamespace()
    experts = 2 * 7 * (62 * 29 + 29 * 31)
    total = model.num_parameters()
    with pytest.warns(
        UserWarning,
        match=f"experts as they were: {experts:,} of {total:,} parameters .{experts / total:.0%}",
    ):
        warn_of_plain_experts(model)
    for layer in model.sparse_layers():
        for name, weight in list(layer.experts.named_parameters()):
            setattr(
                layer.experts, name, nn.Parameter(weight.data.to(torch.int8), requires_grad=False)
            )
    recwarn.clear()
    warn_of_plain_experts(model)
    assert not recwarn


@pytest.mark.filterwarnings("ignore")  # of torchao about itself
@pytest.mark.parametrize(("experts", "share"), [(False, 0.32), (True, 0.93)])
def test_a_quantised_model_saves_and_loads_the_same(tmp_path, experts, share):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    int8 = quantization.Int8WeightOnlyConfig()
    given = quantization.FqnToConfig({"re:.*_proj": int8}) if experts else int8
    model = tiny_model(d_model=32, d_ff=64, eval_capacity_factor=None)
    model.save_pretrained(tmp_path / "wide")
    quantised = STMoEForConditionalGeneration.from_pretrained(
        tmp_path / "wide", quantization_config=TorchAoConfig(given)
    )
    narrow = sum(
        weight.numel() for weight in quantised.parameters() if type(weight.data) is not torch.Tensor
    )
    assert abs(narrow / model.num_parameters() - share) < 0.01
    quantised.save_pretrained(tmp_path / "narrow")
    loaded = STMoEForConditionalGeneration.from_pretrained(tmp_path / "narrow")
    with torch.no_grad():
        wide, a, b = (each(**tiny_batch()).logits for each in (model, quantised, loaded))
    assert torch.equal(a, b)
    assert (a - wide).abs().mean() < 0.03 * wide.abs().mean()
