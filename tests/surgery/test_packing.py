"""Packed models answer as before from packed weights alone, and are saved as they were."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import T5Config, T5ForConditionalGeneration

from moe import load
from moe.kernels.packed_weight import PackedWeight
from moe.surgery import pack_weights
from moe.surgery.packing import can_pack
from tests.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.skipif(not can_pack(torch.ones(2, 3)), reason="this torch has no oneDNN")

LARGE = {"d_model": 262, "d_kv": 53, "num_heads": 5, "d_ff": 257, "eval_capacity_factor": None}


@pytest.fixture
def unpacked(monkeypatch):
    """Weights that were unpacked."""
    weights = []
    dequantize = PackedWeight.dequantize
    monkeypatch.setattr(PackedWeight, "dequantize", lambda w: weights.append(w) or dequantize(w))
    return weights


def packed_names(model):
    return {name for name, weight in model.named_parameters() if isinstance(weight, PackedWeight)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_answers_as_before(dtype, tied, unpacked):
    model = tiny_model(**LARGE, vocab_size=307, tie_word_embeddings=tied).to(dtype)
    batch = tiny_batch()
    answer = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    expected = model(**batch).logits
    tokens = model.generate(**answer, max_new_tokens=5)

    pack_weights(model)
    logits = model(**batch).logits
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits, expected.detach(), rtol=tolerance, atol=tolerance)
    assert torch.equal(model.generate(**answer, max_new_tokens=5), tokens)
    assert not unpacked

    names = packed_names(model)
    assert {name for name in names if ".experts." in name}
    assert "lm_head.weight" in names
    assert not {name for name in names if "embed" in name or "router" in name}


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_saved_as_it_was(tmp_path, tied):
    model = tiny_model(**LARGE, vocab_size=307, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "before")
    pack_weights(model)
    model.save_pretrained(tmp_path / "after")
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_packed_model_has_nothing_to_train_or_convert():
    model = tiny_model(**LARGE)
    pack_weights(model)
    assert not any(weight.requires_grad for weight in model.to(torch.float32).parameters())
    with pytest.raises(RuntimeError, match="Conversion would change a packed weight"):
        model.to(torch.bfloat16)


def test_small_static_and_wide_weights_stay_as_they_are():
    for model in (tiny_model(), tiny_model(**LARGE).double()):
        pack_weights(model)
        assert not packed_names(model)
    model = tiny_model(**LARGE, dispatch="static")
    pack_weights(model)
    assert packed_names(model)
    assert not {name for name in packed_names(model) if ".experts." in name}


def test_models_of_transformers_are_packed_too(unpacked):
    torch.manual_seed(0)
    config = T5Config(
        d_model=262,
        d_kv=53,
        num_heads=5,
        d_ff=257,
        num_layers=1,
        vocab_size=131,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    batch = tiny_batch()
    expected = model(**batch).logits
    pack_weights(model)
    torch.testing.assert_close(model(**batch).logits, expected.detach(), rtol=1e-4, atol=1e-4)
    assert packed_names(model)
    assert not unpacked


def test_load_packs_when_it_is_asked_to_and_weights_are_not_in_files():
    texts = ["el: New Zealand", "de: Old Persian"]
    plain = load("names")
    assert not packed_names(plain.engine.model)
    assert not packed_names(load("names", mmap=True, pack=True).engine.model)
    packed = load("names", pack=True)
    assert packed_names(packed.engine.model)
    assert packed(texts) == plain(texts)
