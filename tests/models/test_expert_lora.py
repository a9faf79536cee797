"""Adapters of experts inside the products, against PEFT's own forward pass, which adds B A to the stacked
weights, and against formulas by hand.
"""

import copy
import math

import pytest
import torch
from einops import rearrange
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import moe.sparse.dispatch
import moe.sparse.layer
from moe import (
    ConfigError,
    SparseConfig,
    SparseFeedForward,
    lora_config,
    record_routing,
    replace_feed_forward,
)
from moe.kernels.expert_rows import ExpertRows
from moe.kernels.expert_weights import LowRank
from moe.sparse.adapters import NO_ADAPTERS, Adapters, read_adapters
from moe.sparse.dispatch import Arrived, SortedRows, UngatheredRows
from moe.sparse.experts import Experts
from moe.tracing.recorder import traced_batches
from moe.training.step import learns_from_load
from tests.largest_tensor import LargestFloats
from tests.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

STACKED = ["experts.down_proj", "experts.gate_up_proj"]

FORMS = {
    "fused": {},
    "rows": {},
    "slots": {"dispatch": "static"},
    "ReLU, a bias": {"feed_forward_proj": "relu", "expert_bias": "multiplicative"},
    "capacity, shared experts": {"capacity_factor": 0.6, "num_shared_experts": 2},
}


def attach(model, **options):
    """Returns the model with adapters whose B is not zero."""
    model = get_peft_model(model, lora_config(model, **{"rank": 3, "alpha": 6, **options}))
    randomize(model)
    return model


def randomize(model, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(0.1 * noise)


@torch.no_grad()
def logits_of(model):
    return model(**tiny_batch()).logits


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(**tiny_batch()).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    return loss.detach(), gradients


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.fixture
def plain_peft(monkeypatch):
    """Returns a function that has the layers call PEFT's wrappers from then on."""

    def call_wrappers(experts, *_):
        return experts, NO_ADAPTERS

    return lambda: monkeypatch.setattr(moe.sparse.layer, "read_adapters", call_wrappers)


@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_equal_those_of_plain_peft(form, monkeypatch, plain_peft):
    if form == "rows":
        monkeypatch.setattr(moe.sparse.dispatch, "has_fused_experts", lambda _: False)
    model = attach(tiny_model(**FORMS[form]).double()).train()
    loss, gradients = loss_and_gradients(model)
    base_loss = model.unload()(**tiny_batch()).loss
    assert abs(loss - base_loss) > 1e-3

    model = attach(tiny_model(**FORMS[form]).double()).train()
    plain_peft()
    expected_loss, expected = loss_and_gradients(model)
    close(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        close(gradient, expected[name])
        assert gradient.abs().max() > 0, name


def test_an_expert_by_hand_changes_by_its_own_low_rank_product():
    """W_e + s B_e A_e in a plain model, with A_e and B_e cut out of PEFT's matrices; s = alpha / r."""
    model = attach(tiny_model().double(), attention=False)
    expected = copy.deepcopy(model).unload()
    layers = zip(expected.sparse_layers(), model.base_model.model.sparse_layers(), strict=True)
    for plain, adapted in layers:
        for wrapper in (adapted.experts, adapted.experts.base_layer):
            a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
            weight = plain.experts.get_parameter(wrapper.parameter_name)
            for expert in range(7):
                a_e, b_e = a[3 * expert : 3 * expert + 3], b[:, expert::7]
                weight.data[expert] += 6 / 3 * b_e @ a_e
    close(logits_of(model), logits_of(expected))


@pytest.mark.parametrize("name", STACKED)
def test_one_product_alone_is_adapted(name, plain_peft):
    config = LoraConfig(r=3, target_parameters=[name])
    model = get_peft_model(tiny_model().double(), config).train()
    randomize(model)
    loss, gradients = loss_and_gradients(model)
    plain_peft()
    expected_loss, expected = loss_and_gradients(model)
    close(loss, expected_loss)
    assert len(gradients) == 2 * 2
    for key, gradient in gradients.items():
        close(gradient, expected[key])


def test_two_adapters_add_up_and_one_can_be_chosen(plain_peft):
    model = attach(tiny_model().double())
    model.add_adapter("second", lora_config(model.base_model.model.__class__(model.config), rank=2))
    randomize(model, seed=4)
    logits = {}
    for names in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(names)
        logits[tuple(names)] = logits_of(model)
    with model.disable_adapter():
        logits[()] = logits_of(model)
    assert torch.equal(logits[()], logits_of(tiny_model().double()))
    plain_peft()
    for names, ours in logits.items():
        if names:
            model.base_model.set_adapter(list(names))
            close(ours, logits_of(model))
    assert len({float(ours.sum()) for ours in logits.values()}) == 4


def test_merging_unmerging_and_disabling_a_merged_adapter_give_the_same_numbers():
    base = tiny_model().double()
    before = logits_of(base)
    model = attach(base)
    adapted = logits_of(model)
    model.merge_adapter()
    close(logits_of(model), adapted)
    model.unmerge_adapter()
    close(logits_of(model), adapted)
    model.merge_adapter()
    with model.disable_adapter():  # which unmerges, as in PEFT
        close(logits_of(model), before)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_scales_ranks_and_their_patterns_are_those_of_peft():
    options = {
        "use_rslora": True,
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {"experts.gate_up_proj": 5},
    }
    model = attach(tiny_model().double(), attention=False, **options)
    layer = model.base_model.model.sparse_layers()[0]
    by_name = {w.parameter_name: w for w in (layer.experts, layer.experts.base_layer)}
    down, gate_up = by_name["down_proj"], by_name["gate_up_proj"]
    assert down.lora_A["default"].weight.shape == (7 * 2, 31)
    assert down.scaling["default"] == pytest.approx(6 / math.sqrt(2))
    assert gate_up.scaling["default"] == pytest.approx(5 / math.sqrt(3))
    adapted = logits_of(model)
    close(logits_of(model.merge_and_unload()), adapted)


def test_adapters_saved_here_load_in_plain_peft_and_back(tmp_path, plain_peft):
    model = attach(tiny_model().double(), modules_to_save=["final_norm"], lora_dropout=0.25).eval()
    expected = logits_of(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model().double(), tmp_path).eval()
    assert torch.equal(logits_of(loaded), expected)
    plain_peft()
    close(logits_of(loaded), expected)


ROWS = 40


def dropout_inputs(form):
    """Returns rows of ones for expert 0 in the form of a dispatcher."""
    x = torch.ones(ROWS, 256, dtype=torch.float64)
    if form == "slots":
        return torch.stack([x, x])
    every = torch.arange(ROWS)
    rows = ExpertRows(torch.tensor([ROWS, 0]), every, torch.ones(ROWS).double(), every, every)
    return UngatheredRows(x, rows) if form == "gathered" else SortedRows(x, rows.ends())


@pytest.mark.parametrize("form", ["gathered", "rows", "slots"])
def test_dropout_of_adapters_drops_inputs_of_a(form):
    """The first product is zero but for its adapter: with x = A = B = 1 it counts the inputs that are kept,
    scaled by 1 / (1 - p). The second is the mean over the hidden units.
    """
    torch.manual_seed(0)
    config = SparseConfig(num_experts=2, d_ff=16, d_model=256, activation="relu", gated=False)
    experts = Experts(config).double()
    experts.up_proj.data.zero_()
    experts.down_proj.data.fill_(1 / 16)
    a = torch.ones(2, 1, 256, dtype=torch.float64, requires_grad=True)
    b = torch.ones(2, 1, 16, dtype=torch.float64)
    output = experts(
        Arrived(dropout_inputs(form)), Adapters(LowRank(a, b, torch.ones(1)), dropout_rate=0.25)
    )
    num_kept = 0.75 * output.detach().reshape(-1, 256)[:ROWS, 0]
    close(num_kept, num_kept.round(), 1e-9)
    deviation = math.sqrt(256 * 0.25 * 0.75)
    assert abs(num_kept.mean() - 256 * 0.75) < 4 * deviation / math.sqrt(ROWS)
    assert num_kept.std() == pytest.approx(deviation, rel=0.5)

    # dA is the number of rows that kept an input, scaled likewise.
    output.reshape(-1, 256)[:ROWS, 0].sum().backward()
    num_rows = 0.75 * a.grad[0, 0]
    close(num_rows, num_rows.round(), 1e-9)
    assert num_rows.sum() == pytest.approx(num_kept.sum().item())


def test_dropout_is_of_training_and_the_same_for_all_active_adapters():
    model = attach(tiny_model(), lora_dropout=0.25).eval()
    layer = model.base_model.model.sparse_layers()[0]
    assert read_adapters(layer.experts, 7, None)[1].dropout_rate == 0
    model.train()
    assert read_adapters(layer.experts, 7, None)[1].dropout_rate == 0.25
    train_logits = [logits_of(model) for _ in range(2)]
    assert not torch.equal(*train_logits)
    model.add_adapter("other", lora_config(tiny_model(), lora_dropout=0.5))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match=r"one lora_dropout, got \[0.25, 0.5\]"):
        model(**tiny_batch())
    model.base_model.set_adapter("default")
    layer.experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"lora_dropout .* hooks"):
        model(**tiny_batch())
    model.eval()(**tiny_batch())


def test_an_adapter_for_each_example_is_refused_by_peft():
    model = attach(tiny_model())
    with pytest.raises(ValueError, match=r"mixed adapter batches|adapter_names"):
        model(**tiny_batch(), adapter_names=["default"] * 3 + ["__base__"])


def test_the_gate_of_a_router_takes_an_adapter():
    base = tiny_model(router="bias_balanced", router_options=None).double()
    gate = base.sparse_layers()[0].router.gate.detach().clone()
    config = LoraConfig(r=3, target_parameters=["router.gate"])
    model = get_peft_model(base, config)
    randomize(model)
    _, gradients = loss_and_gradients(model.train())
    assert len(gradients) == 2 * 2 and all(g.abs().max() > 0 for g in gradients.values())
    assert learns_from_load(base.sparse_layers()[0])
    assert record_routing(base, traced_batches([tiny_batch()])).document.numel()

    # By hand: W + alpha / r B A.
    wrapper = base.sparse_layers()[0].router
    change = wrapper.lora_B["default"].weight @ wrapper.lora_A["default"].weight
    merged = model.merge_and_unload().sparse_layers()[0].router.gate
    close(merged, gate + 8 / 3 * change)


def adapted_layer(dispatch="ragged", rank=3, **fields):
    """Returns a layer of many experts with adapters, whose weights are larger than all else."""
    torch.manual_seed(0)
    config = SparseConfig(
        64, 128, 23, dispatch=dispatch, router="switch", num_selected_experts=1, **fields
    )
    layer = nn.ModuleDict({"sparse": SparseFeedForward(config)})
    layer = get_peft_model(layer, lora_config(layer, rank=rank, attention=False)).base_model.model
    randomize(layer)
    return layer["sparse"]


QUANTIZED = {"bits": 4, "group_size": 32}


@pytest.mark.parametrize("form", ["fused", "rows", "slots", "quantized", "quantized rows"])
def test_no_tensor_of_a_step_is_as_large_as_the_stack(form, one_thread, monkeypatch, plain_peft):
    if form.endswith("rows"):
        monkeypatch.setattr(moe.sparse.dispatch, "has_fused_experts", lambda _: False)
    fields = {"expert_quantization": QUANTIZED} if form.startswith("quantized") else {}
    layer = adapted_layer("static" if form == "slots" else "ragged", **fields).train()
    x = torch.randn(2, 8, 64, requires_grad=True)
    with LargestFloats(layer.parameters()) as largest:
        layer(x)[0].square().sum().backward()
    assert layer.experts.lora_A["default"].weight.grad.abs().max() > 0
    assert 0 < largest.numel < 23 * 64 * 128

    # PEFT's own forward pass has one, which this test would see.
    plain_peft()
    with LargestFloats(layer.parameters()) as largest:
        layer(x)
    assert largest.numel >= 23 * 64 * 128


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_quantized_experts_train_adapters_as_the_dequantized_ones_do(dropout):
    quantized = adapted_layer(expert_quantization=QUANTIZED).train()
    plain = adapted_layer().train()
    for ours, theirs in zip(unwrapped_weights(plain), unwrapped_weights(quantized), strict=True):
        ours.data.copy_(theirs.dequantize())
    for layer in (plain, quantized):
        for wrapper in (layer.experts, layer.experts.base_layer):
            wrapper.lora_dropout["default"] = nn.Dropout(dropout)
    x = torch.randn(2, 40, 64)
    gradients = []
    for layer in (plain, quantized):
        torch.manual_seed(1)
        layer(x)[0].square().sum().backward()
        gradients.append([p.grad for p in layer.parameters() if p.requires_grad])
    assert len(gradients[0]) == 4
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def unwrapped_weights(layer):
    experts = layer.experts.get_base_layer()
    return experts.gate_up_proj, experts.down_proj


def test_factors_move_only_where_an_expert_has_rows():
    layer = adapted_layer().double().train()
    y, router_output = layer(torch.randn(1, 7, 64, dtype=torch.float64))
    y.square().sum().backward()
    expert, _ = router_output.plan.expert_index.flatten().unique(return_counts=True)
    has_rows = torch.zeros(23, dtype=torch.bool).index_fill(0, expert, True)
    assert 0 < has_rows.sum() < 23
    for wrapper in (layer.experts, layer.experts.base_layer):
        d_a = wrapper.lora_A["default"].weight.grad.view(23, 3, -1)
        d_b = wrapper.lora_B["default"].weight.grad.view(-1, 3, 23)
        assert torch.equal(d_a.abs().amax((1, 2)) > 0, has_rows)
        assert torch.equal(d_b.abs().amax((0, 1)) > 0, has_rows)


@pytest.mark.parametrize("rank", [1, 5, 64])
@pytest.mark.parametrize("form", ["fused", "rows"])
def test_bfloat16_is_close_to_float64_at_any_rank(form, rank, monkeypatch):
    if form == "rows":
        monkeypatch.setattr(moe.sparse.dispatch, "has_fused_experts", lambda _: False)
    results = []
    x = torch.randn(2, 40, 64)
    for dtype in (torch.float64, torch.bfloat16):
        layer = adapted_layer(rank=rank).bfloat16().to(dtype).eval()
        y = layer(x.bfloat16().to(dtype))[0]
        y.sum().backward()
        results.append([y, *(p.grad for p in layer.parameters() if p.requires_grad)])
    for exact, rounded in zip(*results, strict=True):
        assert rounded.dtype == torch.bfloat16
        assert (rounded.double() - exact).norm() < 0.03 * exact.norm()


def output_and_gradients(layer, run):
    """Returns the output for fixed tokens, and the gradients of all that trains, by one of the layer's forms."""
    torch.manual_seed(1)
    for parameter in layer.parameters():
        parameter.grad = None
    y = run(torch.randn(2, 13, 64, dtype=torch.float64))[0]
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in layer.parameters() if p.requires_grad)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch's compiler
@pytest.mark.parametrize("form", ["fused", "rows", "slots"])
def test_a_compiled_layer_has_the_same_outputs_and_gradients(form, monkeypatch):
    if form == "rows":
        monkeypatch.setattr(moe.sparse.dispatch, "has_fused_experts", lambda _: False)
    layer = adapted_layer(**FORMS[form]).double().eval()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = output_and_gradients(layer, layer)
    assert len(expected) == 1 + 4
    for a, b in zip(output_and_gradients(layer, compiled), expected, strict=True):
        close(a, b)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # where the graph breaks
def test_a_compiled_layer_drops_inputs_of_adapters_as_an_eager_one_does():
    layer = adapted_layer().double().eval()
    layer.experts.train()
    for wrapper in (layer.experts, layer.experts.base_layer):
        wrapper.lora_dropout["default"] = nn.Dropout(0.25)
    compiled = torch.compile(layer, backend="aot_eager")
    expected = output_and_gradients(layer, layer)
    for a, b in zip(output_and_gradients(layer, compiled), expected, strict=True):
        close(a, b)
    dropped, *_ = expected
    layer.eval()
    assert not torch.allclose(output_and_gradients(layer, layer)[0], dropped)


def test_another_transformer_gets_adapters_of_its_experts(plain_peft):
    torch.manual_seed(0)
    transformer = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(29, 1, 31, batch_first=True), 2, enable_nested_tensor=False
    )
    config = SparseConfig(29, 31, 7)
    replace_feed_forward(transformer.layers[1], config)
    transformer = transformer.double().eval()
    with pytest.raises(ConfigError, match="has no attention that it can adapt"):
        lora_config(transformer)
    model = get_peft_model(transformer, lora_config(transformer, rank=3, attention=False))
    randomize(model)
    x = torch.randn(2, 13, 29, dtype=torch.float64)
    with torch.no_grad():
        ours = model(x)
        plain_peft()
        close(ours, model(x))


def test_bad_ranks_options_and_adapters_are_refused_with_their_shapes(tmp_path):
    with pytest.raises(ConfigError, match=r"rank=16; expected at most 15, the width of .*q_proj"):
        lora_config(tiny_model(), rank=16, experts=False)
    with pytest.raises(ConfigError, match=r"rank=30; expected at most 29, .*experts"):
        lora_config(tiny_model(), rank=30, attention=False)
    for option in ({"use_dora": True}, {"lora_bias": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            lora_config(tiny_model(), **option)

    # An adapter of another number of experts, and one whose B is stored with the experts first.
    model = attach(tiny_model(num_experts=5))
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"15, 31\]\).*21, 31\]"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
    model = attach(tiny_model())
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "adapter_model.safetensors")
    for name, weight in state.items():
        if ".experts." in name and "lora_B" in name:
            state[name] = rearrange(weight, "o (r e) -> e o r", e=7).contiguous()
    save_file(state, tmp_path / "adapter_model.safetensors")
    with pytest.raises(RuntimeError, match=r"7, 29, 3\]\).*29, 21\]"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
