"""docs/comparison.md says what transformers' two sparse encoder-decoders do: here they do it."""

import inspect

import pytest
import torch
import transformers
from transformers import (
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

pytestmark = pytest.mark.skipif(
    transformers.__version__ != "5.23.0", reason="the table is about transformers 5.23.0"
)

SWITCH = {
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "d_kv": 6,
    "num_heads": 4,
    "dropout_rate": 0,
}
SIDES = ("encoder", "decoder")
SIZES = {"layers": 2, "ffn_dim": 32, "sparse_step": 1, "attention_heads": 4, "layerdrop": 0.0}
RATES = ("dropout", "attention_dropout", "activation_dropout", "moe_token_dropout")
NLLB = dict.fromkeys(RATES, 0.0)
for side in SIDES:
    NLLB |= {f"{side}_{name}": value for name, value in SIZES.items()}
SMALLEST = {
    "switch": {"num_layers": 1, "num_decoder_layers": 1}
    | dict.fromkeys([f"num_sparse_{side}_layers" for side in SIDES], 1),
    "nllb": dict.fromkeys([f"{side}_layers" for side in SIDES], 1),
}
KINDS = ["switch", "nllb"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind, **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 24, "num_experts": 5, "decoder_start_token_id": 0}
    if kind == "switch":
        more = {"d_ff": 32, "num_layers": 4, "num_decoder_layers": 4, **SWITCH, **fields}
        return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes, **more))
    more = {"max_position_embeddings": 64, **NLLB, **fields}
    return NllbMoeForConditionalGeneration(NllbMoeConfig(**sizes, **more))


def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (3, 9), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(3, 97, (3, 7), generator=generator)}


def cross_entropy(output):
    return torch.nn.functional.cross_entropy(
        output.logits.flatten(0, 1), batch()["labels"].flatten()
    )


@every_kind
def test_router_losses_are_off_unless_asked_for_and_nllb_has_no_z_loss(kind):
    model = build(kind).train()
    output = model(**batch())
    torch.testing.assert_close(output.loss, cross_entropy(output))
    output = model(**batch(), output_router_logits=True)
    assert output.loss > cross_entropy(output) + 1e-3
    assert (output.encoder_z_loss is None) == (kind == "nllb")
    assert hasattr(model.config, "output_router_logits") == (kind == "nllb")


def test_only_the_first_two_experts_of_nllb_run():
    model, ran = build("nllb"), set()
    for name, module in model.named_modules():
        if name.rpartition(".")[2].startswith("expert_"):
            module.register_forward_hook(lambda *_, name=name: ran.add(name.rpartition(".")[2]))
    model(**batch())
    assert ran == {"expert_0", "expert_1"}


@every_kind
def test_padding_takes_the_capacity_of_switch_only(kind):
    encoder, ids = build(kind, expert_capacity=3).eval().get_encoder(), batch()["input_ids"]
    padding, mask = torch.full((3, 12), encoder.config.pad_token_id), torch.ones_like(ids)
    padded = encoder(torch.cat([padding, ids], 1), torch.cat([padding * 0, mask], 1))[0][:, 12:]
    moved = (padded - encoder(ids, mask)[0]).abs().max()
    assert moved > 1 if kind == "switch" else moved < 1e-5


def test_an_evaluation_replaces_the_training_capacity_of_nllb():
    model = build("nllb", expert_capacity=3)
    for training in (False, True):
        model.train(training)(**batch())
    assert model.model.encoder.layers[0].ffn.router.expert_capacity == 27


@every_kind
def test_the_number_of_targets_is_taken_and_ignored(kind):
    model = build(kind).eval()
    parameters = inspect.signature(model.forward).parameters.values()
    assert inspect.Parameter.VAR_KEYWORD in {parameter.kind for parameter in parameters}
    counted = model(**batch(), num_items_in_batch=torch.tensor(999))
    assert torch.equal(counted.loss, model(**batch()).loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler about their code
@every_kind
def test_there_is_one_kind_of_attention_no_plan_for_ranks_and_no_single_graph_but_a_static_cache(
    kind,
):
    with pytest.raises(ValueError, match="does not support an attention implementation through"):
        build(kind, attn_implementation="sdpa")
    model, ids = build(kind).eval(), batch()["input_ids"]
    assert not model._tp_plan
    assert getattr(model.config, "base_model_ep_plan", None) is None
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    static = model.generate(
        ids, max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True
    )
    assert torch.equal(tokens, static)
    small = build(kind, **SMALLEST[kind]).eval()
    assert torch._dynamo.explain(small)(input_ids=ids, decoder_input_ids=ids).graph_break_count > 0
