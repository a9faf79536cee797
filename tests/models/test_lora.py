"""LoRA by PEFT on attention and experts. Oracles: the base model before it; the same weights merged
by hand.
"""

import copy
import sys

import pytest
import torch
from peft import AutoPeftModelForSeq2SeqLM, LoraConfig, PeftModel, get_peft_model
from transformers import T5ForConditionalGeneration

from moe import ConfigError, STMoEForConditionalGeneration, lora_config
from moe.convert.formats import convert_checkpoint
from moe.models.pretrained import enable_activation_checkpointing
from tests.models.tiny import DENSE, tiny_batch, tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

KINDS = {
    "gated": {"tie_word_embeddings": True, "expert_bias": "multiplicative"},
    "relu": {"feed_forward_proj": "relu", "dispatch": "static"},
}


def attach(model, **options):
    return get_peft_model(model, lora_config(model, **{"rank": 3, "alpha": 6, **options}))


def train(model, steps=5, lr=0.02, bfloat16=False):
    """Returns the losses of steps on one batch."""
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = model(**tiny_batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def logits(model, **changes):
    with torch.no_grad():
        return model(**{**tiny_batch(seed=5), **changes}).logits


def trainable(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def close(a, b, atol):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_adapters_change_nothing_at_first_then_learn_and_merge_into_a_plain_model(fields, tmp_path):
    base = tiny_model(**fields).double()
    expected, before = logits(base), copy.deepcopy(base.state_dict())
    model = attach(base)
    close(logits(model), expected, 1e-12)
    assert all("lora_" in name for name in trainable(model))
    losses = train(model)
    assert losses[-1] < losses[0]
    assert not torch.allclose(logits(model), expected, atol=1e-2)

    # The base is as it was.
    for name, parameter in copy.deepcopy(model).unload().named_parameters():
        assert torch.equal(parameter, before[name]), name

    # The merged model computes the same, also after saving.
    unmerged, unmerged_loss = logits(model), model(**tiny_batch()).loss
    merged = model.merge_and_unload()
    close(logits(merged), unmerged, 1e-10)
    close(merged(**tiny_batch()).loss, unmerged_loss, 1e-10)
    merged.save_pretrained(tmp_path)
    loaded, info = STMoEForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    close(logits(loaded), unmerged, 1e-10)


@pytest.mark.filterwarnings("ignore:Model has `tie_word|Input and output embeddings:UserWarning")
@pytest.mark.parametrize("whole", ["lm_head", "embed_tokens"])
def test_a_tied_head_that_a_merge_unties_is_scaled_as_before(tmp_path, whole):
    model = tiny_model(**DENSE, tie_word_embeddings=True).double()
    expected = logits(model)
    config = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=[whole])
    merged = get_peft_model(model, config).merge_and_unload()
    assert not merged.config.tie_word_embeddings and merged.config.scale_decoder_outputs
    close(logits(merged), expected, 1e-12)

    # So is one that has learned something else, when it is saved, resized, or written for transformers' T5.
    merged.lm_head.weight.data[7:] += 0.5
    expected = logits(merged)
    merged.save_pretrained(tmp_path / "saved")
    for form in ("t5", "ours"):
        (tmp_path / form).mkdir()
    convert_checkpoint(tmp_path / "saved", tmp_path / "t5", form="t5")
    convert_checkpoint(tmp_path / "t5", tmp_path / "ours")
    from_pretrained = STMoEForConditionalGeneration.from_pretrained
    for name in ("saved", "t5", "ours"):
        close(logits(from_pretrained(tmp_path / name)), expected, 1e-10)
    theirs = T5ForConditionalGeneration.from_pretrained(tmp_path / "t5")
    theirs_logits = theirs(**tiny_batch(seed=5)).logits
    close(theirs_logits, expected, 1e-5)  # their norms are float32
    merged.resize_token_embeddings(139)
    close(logits(merged)[..., :131], expected, 1e-10)


def test_saved_adapters_name_their_base_give_the_same_model_and_learn_further(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    model = attach(STMoEForConditionalGeneration.from_pretrained(tmp_path / "base"))
    train(model)
    model.save_pretrained(tmp_path / "adapters")
    loaded = AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "adapters").eval()
    close(logits(loaded), logits(model), 0)
    further = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapters", is_trainable=True)
    losses = train(further, steps=3, lr=1e-3)
    assert losses[-1] < losses[0]


def test_an_adapter_of_an_expert_is_its_own_low_rank_change():
    """By hand: expert e changes by alpha / rank * B_e A_e, with A_e and B_e cut out of the stacked
    adapters.
    """
    base = tiny_model().double()
    down = base.sparse_layers()[0].experts.down_proj.detach().clone()
    model = attach(base, attention=False)
    train(model, steps=3)
    wrapper = next(m for m in model.modules() if getattr(m, "parameter_name", "") == "down_proj")
    a, b = wrapper.lora_A["default"].weight.detach(), wrapper.lora_B["default"].weight.detach()
    merged = model.merge_and_unload().sparse_layers()[0].experts.down_proj
    for expert in range(7):
        change = b.reshape(29, 3, 7)[:, :, expert] @ a.reshape(7, 3, 31)[expert]
        close(merged[expert], down[expert] + 6 / 3 * change, 1e-12)
    assert torch.linalg.matrix_rank(merged[0] - down[0], rtol=1e-9) == 3


def test_experts_alone_and_attention_alone_hold_what_they_say():
    experts, attention, both = (
        trainable(attach(tiny_model(), **options))
        for options in ({"attention": False}, {"experts": False}, {"experts": True})
    )
    assert experts and all(".experts." in name for name in experts)
    assert attention and all("_attention." in name for name in attention)
    assert both == experts | attention
    assert len(experts) == 2 * 2 * 2  # layers, products, A and B
    assert (
        len(attention) == (2 + 3 + 3) * 4 * 2
    )  # attentions of encoder and decoder, projections, A and B


def test_every_adapter_has_a_gradient_that_is_right():
    """The gradient of B against a difference quotient, through the experts' own autograd node."""
    model = attach(tiny_model(capacity_factor=None).double(), rank=2).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model(**tiny_batch()).loss.backward()
    for name in ("down_proj", "gate_up_proj", "q_proj"):
        wrappers = (m for m in model.modules() if hasattr(m, "lora_A"))
        module = next(m for m in wrappers if getattr(m, "parameter_name", "q_proj") == name)
        for side in (module.lora_A, module.lora_B):
            parameter = side["default"].weight
            direction = torch.randn_like(parameter)
            quotient = 0.0
            for sign in (1, -1):
                with torch.no_grad():
                    parameter += sign * 1e-6 * direction
                    quotient += sign * model(**tiny_batch()).loss.item() / 2e-6
                    parameter -= sign * 1e-6 * direction
            assert (parameter.grad * direction).sum().item() == pytest.approx(quotient, rel=1e-5), (
                name
            )


def test_adapters_work_under_activation_checkpointing_and_in_autocast():
    gradients = []
    for checkpointed in (False, True):
        model = attach(tiny_model().double()).train()
        if checkpointed:
            enable_activation_checkpointing(model.base_model.model, {"use_reentrant": False})
        model(**tiny_batch()).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient, 1e-12)
    model = attach(tiny_model())
    expected = train(copy.deepcopy(model), steps=5)
    rounded = train(model, steps=5, bfloat16=True)
    assert rounded == pytest.approx(expected, rel=0.05) and rounded != expected


def test_what_cannot_be_attached_is_refused():
    with pytest.raises(ConfigError, match=r"has no experts .* experts=False"):
        lora_config(tiny_model(**DENSE))
    assert trainable(attach(tiny_model(**DENSE), experts=False))
    model = tiny_model()
    for name in ("alhpa", "r", "target_modules"):
        with pytest.raises(TypeError, match=name):
            lora_config(model, **{name: 3})
    lora_config(model, experts=False, use_dora=True)
    assert lora_config(model, experts=False, lora_dropout=0.1).lora_dropout == 0.1
    with pytest.raises(ConfigError, match=r"PeftModelForSeq2SeqLM .* without adapters"):
        lora_config(attach(model))


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "moe.models.expert_lora", raising=False)
    with pytest.raises(ConfigError, match=r"needs peft.*'stmoe\[finetune\]'"):
        lora_config(tiny_model())
