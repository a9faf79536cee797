"""Models in float16 whose activations are larger than its largest number, 65504.

Oracle: the same numbers in float32.
"""

import json

import pytest
import torch

import stmoe
from moe import STMoEForConditionalGeneration
from moe.checkpoint.loading import load_model
from tests.models.tiny import DENSE, tiny_batch, tiny_model

FAMILIES = {
    "dense": DENSE,
    "relu": {**DENSE, "feed_forward_proj": "relu"},
    "ragged": {"eval_capacity_factor": None},
    "static": {"eval_capacity_factor": None, "dispatch": "static", "expert_bias": "additive"}
    | {"num_shared_experts": 1},
}
TOKENS = {"max_new_tokens": 7}


def large_model(**fields):
    """Returns a model whose feed-forward layers return numbers of about 10^6."""
    model = tiny_model(**fields)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "down_proj" in name:
                weight *= 30_000 / weight.abs().max()
            elif "up_proj" in name:
                weight *= 30
            weight.copy_(weight.half())
    return model


def saved_in_float16(model, folder):
    model.save_pretrained(folder / "wide")
    stmoe.main(
        ["convert", "--from", f"{folder}/wide", "--to", f"{folder}/narrow", "--dtype", "float16"]
    )
    return folder / "narrow"


@torch.no_grad()
@pytest.mark.parametrize("fields", FAMILIES.values(), ids=FAMILIES)
def test_a_model_converted_to_float16_answers_as_in_float32(fields, tmp_path):
    model, batch = large_model(**fields), tiny_batch()
    outputs = model(**batch, output_hidden_states=True)
    assert outputs.decoder_hidden_states[-2].abs().max() > 10 * torch.finfo(torch.float16).max
    folder = saved_in_float16(model, tmp_path)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"

    narrow = STMoEForConditionalGeneration.from_pretrained(folder)
    half = narrow(**batch)
    assert half.logits.dtype == half.encoder_last_hidden_state.dtype == torch.float16
    torch.testing.assert_close(half.logits.float(), outputs.logits, rtol=0, atol=0.05)
    expected = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **TOKENS)
    answers = narrow.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **TOKENS)
    assert torch.equal(answers, expected)
    mapped = load_model(folder, mmap=True)
    assert torch.equal(mapped(**batch).logits, half.logits)


@pytest.mark.parametrize("fields", FAMILIES.values(), ids=FAMILIES)
def test_gradients_in_float16_are_those_of_float32(fields, tmp_path):
    model = large_model(**fields)
    narrow = STMoEForConditionalGeneration.from_pretrained(saved_in_float16(model, tmp_path))
    for each in (model, narrow):
        each(**tiny_batch()).ce_loss.backward()
    gradients = {name: weight.grad for name, weight in narrow.named_parameters()}
    for name, weight in model.named_parameters():
        half, expected = gradients[name], weight.grad
        assert half is not None and expected is not None, name
        if expected.abs().max() > 1e-3:  # others are below the numbers of float16
            assert (half.float() - expected).norm() < 0.05 * expected.norm(), name


@torch.no_grad()
def test_a_dense_model_that_is_all_float16_stays_finite():
    assert large_model(**DENSE).half()(**tiny_batch()).logits.isfinite().all()
