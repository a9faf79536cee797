"""LoRA by PEFT on attention and experts. Oracles: the base model before it; the same weights merged
by hand.
"""

import copy
import subprocess
import sys

import pytest
import torch
from peft import AutoPeftModelForSeq2SeqLM, LoraConfig, PeftModel, get_peft_model

from moe import (
    ConfigError,
    SparseConfig,
    SparseFeedForward,
    STMoEForConditionalGeneration,
    lora_config,
)
from moe.models.pretrained import enable_activation_checkpointing
from tests.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

DENSE = {"num_experts": 0, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
KINDS = {
    "gated": {},
    "relu": {"feed_forward_proj": "relu"},
    "static": {"dispatch": "static"},
    "tied head, expert bias": {"tie_word_embeddings": True, "expert_bias": "multiplicative"},
}


def attach(model, **options):
    return get_peft_model(model, lora_config(model, **{"rank": 3, "alpha": 6, **options}))


def train(model, steps=12, lr=0.02, bfloat16=False):
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


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_adapters_change_nothing_at_first_then_learn_while_the_base_stays(fields):
    base = tiny_model(**fields).double()
    expected, before = logits(base), copy.deepcopy(base.state_dict())
    model = attach(base)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-12)
    assert all("lora_" in name for name in trainable(model))
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0]
    assert not torch.allclose(logits(model), expected, atol=1e-2)
    for name, parameter in model.unload().named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_the_folder_of_the_adapters_alone_names_base_and_kind_of_model(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    model = attach(STMoEForConditionalGeneration.from_pretrained(tmp_path / "base"))
    train(model)
    model.save_pretrained(tmp_path / "adapters")
    loaded = AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "adapters").eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_the_merged_model_equals_the_unmerged_and_is_a_plain_model_again(fields, tmp_path):
    model = attach(tiny_model(**fields))
    train(model)
    unmerged, unmerged_loss = logits(model), model(**tiny_batch()).loss
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), unmerged, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged(**tiny_batch()).loss, unmerged_loss, rtol=0, atol=1e-5)
    merged.save_pretrained(tmp_path)
    loaded, info = STMoEForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(logits(loaded), unmerged, rtol=1e-5, atol=1e-5)


def test_saved_adapters_on_a_fresh_base_give_the_same_model(tmp_path):
    model = attach(tiny_model())
    train(model)
    model.save_pretrained(tmp_path)
    fresh = PeftModel.from_pretrained(tiny_model(), tmp_path)
    torch.testing.assert_close(logits(fresh), logits(model), rtol=0, atol=1e-6)
    further = PeftModel.from_pretrained(tiny_model(), tmp_path, is_trainable=True)
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
        torch.testing.assert_close(
            merged[expert], down[expert] + 6 / 3 * change, rtol=0, atol=1e-12
        )
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
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-12)
    model = attach(tiny_model())
    expected = train(copy.deepcopy(model), steps=5)
    rounded = train(model, steps=5, bfloat16=True)
    assert rounded == pytest.approx(expected, rel=0.05) and rounded != expected


def test_generation_is_that_of_the_merged_model_with_a_cache_or_without():
    model = attach(tiny_model())
    plain = tiny_model().generate(tiny_batch()["input_ids"], max_new_tokens=7)
    train(model)
    inputs = {name: tiny_batch()[name] for name in ("input_ids", "attention_mask")}
    adapted = model.generate(**inputs, max_new_tokens=7)
    assert torch.equal(adapted, model.generate(**inputs, max_new_tokens=7, use_cache=False))
    assert torch.equal(adapted, model.merge_and_unload().generate(**inputs, max_new_tokens=7))
    assert not torch.equal(adapted, plain)


def test_what_cannot_be_attached_is_refused():
    with pytest.raises(ConfigError, match=r"the model is dense: it has none\. Pass experts=False"):
        lora_config(tiny_model(**DENSE))
    assert trainable(attach(tiny_model(**DENSE), experts=False))
    for arguments, message in (
        ({"experts": False, "attention": False}, "asked for no adapters"),
        ({"rank": 0}, "rank is 0; expected an integer of at least 1"),
        ({"lora_dropout": 0.1}, "cannot drop inputs. Set it to 0"),
        (
            {"target_modules": ["q", "v"]},
            "T5's q, k, v and o are q_proj, k_proj, v_proj and o_proj here",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            lora_config(tiny_model(), **arguments)
    for name in ("alhpa", "r"):
        with pytest.raises(TypeError, match=f"keyword argument '{name}'"):
            lora_config(tiny_model(), **{name: 3})
    assert lora_config(tiny_model(), experts=False, lora_dropout=0.1).lora_dropout == 0.1
    with pytest.raises(
        ConfigError,
        match="got a PeftModelForSeq2SeqLM; expected a model of this library without adapters",
    ):
        lora_config(attach(tiny_model()))


def test_all_linear_of_peft_itself_leaves_the_experts_alone():
    """Why the preset is there."""
    model = get_peft_model(tiny_model(), LoraConfig(r=3, target_modules="all-linear"))
    assert trainable(model) and not any(".experts." in name for name in trainable(model))


def test_a_wrapped_layer_stands_alone_too():
    torch.manual_seed(0)
    layer = SparseFeedForward(SparseConfig(d_model=13, d_ff=11, num_experts=5))
    x, holder = torch.randn(2, 7, 13), torch.nn.ModuleDict({"ffn": layer})
    expected = layer(x)[0].detach()
    model = get_peft_model(
        holder, LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    )
    torch.testing.assert_close(model.base_model.model["ffn"](x)[0], expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_without_peft_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['peft'] = None\n"
        "import moe\nfrom tests.models.tiny import tiny_model\n"
        "try: moe.lora_config(tiny_model())\n"
        "except moe.ConfigError as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=True
    )
    assert (
        said.stdout == "lora_config needs peft. Install it with `pip install 'stmoe[finetune]'`.\n"
    )


@pytest.mark.parametrize(
    "option", [{"use_dora": True}, {"exclude_modules": ["experts"]}, {"layers_to_transform": [0]}]
)
def test_options_that_peft_does_not_heed_for_experts_are_refused(option):
    with pytest.raises(ConfigError, match=f"{next(iter(option))} .*PEFT does not heed that"):
        lora_config(tiny_model(), **option)
    lora_config(tiny_model(), experts=False, **option)


def test_a_rank_that_is_no_integer_is_refused():
    with pytest.raises(ConfigError, match=r"rank is 2.5; expected an integer"):
        lora_config(tiny_model(), rank=2.5)
