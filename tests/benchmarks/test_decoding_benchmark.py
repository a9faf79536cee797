"""The benchmark of decoding at a size of milliseconds; the bytes that transformers reads are the oracle of ours."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import decoding
from benchmarks.models.decoding import (
    WEIGHTS,
    cache_bytes,
    count_used_experts,
    quantize_experts,
    run_decoding,
    weight_bytes,
)
from benchmarks.models.model import build_models, draw_tokens
from benchmarks.models.serving import generate, never_end
from moe.kernels.quantized_weight import Quantization
from tests.benchmarks.tiny_case import TINY

STEPS = 6


class ReadWeights(TorchDispatchMode):
    """Records which weights of a model each forward pass reads, and the bytes of its caches after it."""

    def __init__(self, model):
        super().__init__()
        self.weights = {weight.data_ptr(): weight for weight in model.parameters()}
        self.read = []
        self.cached = []
        model.get_decoder().register_forward_pre_hook(lambda *_: self.read.append(set()))
        model.register_forward_hook(self.count_caches)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if self.read and operation is not torch.ops.aten.embedding.default:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            self.read[-1] |= {x.data_ptr() for x in tensors} & self.weights.keys()
        return operation(*args, **(kwargs or {}))

    def count_caches(self, model, args, output):
        caches = output.past_key_values
        layers = [*caches.self_attention_cache.layers, *caches.cross_attention_cache.layers]
        self.cached.append(sum(x.nbytes for layer in layers for x in (layer.keys, layer.values)))

    def bytes_per_step(self):
        """The mean over the steps after the first."""
        steps = zip(self.read[1:], self.cached[1:], strict=True)
        totals = [sum(self.weights[x].nbytes for x in read) + cached for read, cached in steps]
        return sum(totals) / len(totals)


def test_the_counted_bytes_are_those_that_transformers_reads(monkeypatch):
    monkeypatch.setattr(decoding, "STEPS", STEPS)
    models = build_models(TINY, 5)
    inputs = draw_tokens(TINY, 3, TINY.input_length).tolist()
    for model in models.values():
        never_end(model.eval())

    counted = {"t5_sdpa": weight_bytes(models["t5_sdpa"])}
    used, tokens = count_used_experts(models["ours"], inputs, 1 + STEPS)
    counted["switch"] = weight_bytes(models["ours"], used)
    assert 1 < used < 3  # of the 3 that as many tokens could use
    for name, num_bytes in counted.items():
        with ReadWeights(models[name]) as mode:
            decoded = generate(models[name], inputs, 1 + STEPS)
        assert num_bytes + cache_bytes(TINY, 3, torch.float32) == mode.bytes_per_step()
        assert name != "switch" or torch.equal(decoded, tokens)


def test_an_expert_of_8_bits_has_a_byte_for_each_weight_and_scales():
    ours = build_models(TINY, 5, dtype=torch.bfloat16)["ours"]
    dense = weight_bytes(ours)
    assert weight_bytes(ours, 1) - dense == 2 * 2 * 32 * 48
    quantize_experts(ours, Quantization(8))
    assert weight_bytes(ours) == dense
    assert weight_bytes(ours, 1) - dense == 2 * 32 * 48 + 2 * (32 + 48)


@pytest.mark.slow
def test_the_table_has_a_row_for_every_model_and_its_share_of_a_copy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decoding, "STEPS", STEPS)
    path = tmp_path / "decode.json"
    run_decoding(WEIGHTS, [3], [1, 2], rounds=1, json=path, case=TINY)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    models = {"float32": ["ctranslate2"], "bfloat16": [], "int8": ["ctranslate2", "ours", "packed"]}
    for weights in ("float32", "bfloat16"):
        models[weights] += ["ours", "packed", "switch", "t5_sdpa"]
    expected = {(w, batch, name) for w in WEIGHTS for batch in (1, 2) for name in models[w]}
    assert {(row["weights"], row["batch"], row["model"]) for row in rows} == expected
    for row in rows:
        assert row["gb_per_second"] == pytest.approx(row["step_mb"] / row["ms"])
        assert row["of_copy"] == pytest.approx(row["gb_per_second"] / row["copy_gb_per_second"])
    assert "MB/step" in capsys.readouterr().out
