"""The operators of Triton in its interpreter, beside torch's; see test_triton_operators.py.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted.py

Triton reads the variable when it is imported, so these tests are a process of their own.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.cases import Case, build_problem
from benchmarks.layer import build_variants, compare_outputs
from moe import ConfigError
from moe.kernels import triton_hidden, triton_rows
from moe.kernels.expert_rows import combine_choices, gather_choices
from moe.kernels.hidden_units import ExpertForm, hidden_rows
from moe.kernels.row_operators import use_row_operators
from moe.kernels.triton_launch import IS_INTERPRETED
from moe.sparse.dispatch import ChoiceDispatcher, ChoiceRows
from tests.sparse.expert_loop import KINDS
from tests.sparse.layers import (
    ROUTER_NAMES,
    THREE_SLOTS,
    assert_all_close,
    build_layer,
    losses_and_gradients,
)
from tests.synchronisation import NoSynchronisation

assert IS_INTERPRETED, "run this with TRITON_INTERPRET=1"

# Half a unit of the last place of the largest number, after a few roundings of torch's.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def few_parts(monkeypatch):
    """Sums bias gradients in fewer parts: the interpreter runs them one after the other."""
    monkeypatch.setattr(triton_hidden, "_NUM_PARTS", 11)


@pytest.fixture
def on_triton():
    use_row_operators("triton")
    yield
    use_row_operators(None)


def choice_rows(expert, num_experts, dtype):
    """Returns the rows of choices [T, K] of experts; expert E stands for a refused one."""
    choice = expert.flatten().argsort(stable=True)
    row = choice.argsort().reshape(expert.shape)
    return ChoiceRows(
        counts=torch.bincount(expert.flatten(), minlength=num_experts + 1)[:num_experts],
        choice=choice,
        row=row.T.contiguous().T,  # of any strides
        weight=torch.rand(expert.shape[::-1], dtype=dtype).T,
    )


def random_rows(num_tokens, num_choices, dtype, num_experts=5):
    """Returns rows of which some are refused; the first and last expert have none."""
    torch.manual_seed(num_tokens)
    choices = torch.randint(1, num_experts, (num_tokens, num_choices))
    choices[choices == num_experts - 1] = num_experts
    return choice_rows(choices, num_experts, dtype)


def with_unread_rows(x, rows):
    """Returns rows whose last ones, which belong to nobody, are NaN."""
    is_unread = torch.arange(x.shape[0]) >= rows.counts.sum()
    return x.masked_fill(is_unread[:, None], torch.nan)


def assert_close(ours, theirs, dtype):
    """Compares tensors to the precision of a dtype, beside the largest number."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        largest = float(b.abs().max()) if b.numel() else 0.0
        atol = TOLERANCES[dtype] * max(1.0, largest)
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


# ---- rows ----


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "width"),
    [(13, 2, 7), (5, 1, 1), (3, 7, 67), (2, 2, 1031), (0, 2, 7)],
    ids=str,
)
def test_tokens_become_rows_and_rows_tokens(num_tokens, num_choices, width, dtype):
    rows = random_rows(num_tokens, num_choices, dtype)
    num_rows = int(rows.counts.sum())
    tokens = torch.randn(num_tokens, width, dtype=dtype, requires_grad=True)
    ours = triton_rows.triton_gather(tokens, rows)
    theirs = gather_choices(tokens, rows)
    assert torch.equal(ours[:num_rows], theirs[:num_rows])

    d_rows = with_unread_rows(torch.randn_like(theirs), rows)
    (d_ours,) = torch.autograd.grad(ours, tokens, d_rows)
    (d_theirs,) = torch.autograd.grad(theirs, tokens, d_rows)
    assert_close([d_ours], [d_theirs], dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "width"),
    [(13, 2, 7), (5, 1, 1), (3, 7, 67), (2, 2, 1031), (0, 2, 7)],
    ids=str,
)
def test_rows_are_summed_with_weights(num_tokens, num_choices, width, dtype):
    rows = random_rows(num_tokens, num_choices, torch.promote_types(dtype, torch.float32))
    rows = rows._replace(weight=rows.weight.requires_grad_())
    outputs = torch.randn(num_tokens * num_choices, width, dtype=dtype)
    outputs = with_unread_rows(outputs, rows).requires_grad_()
    d_tokens = torch.randn(width, num_tokens, dtype=dtype).T  # of other strides

    results = []
    for combine in (triton_rows.triton_combine, combine_choices):
        tokens = combine(outputs, rows)
        d_outputs, d_weight = torch.autograd.grad(tokens, (outputs, rows.weight), d_tokens)
        num_rows = int(rows.counts.sum())
        results.append([tokens.detach(), d_outputs[:num_rows], d_weight])
    assert_close(*results, dtype)


def test_a_token_without_an_expert_is_zero():
    rows = choice_rows(torch.tensor([[5, 5], [1, 5]]), 5, torch.float32)
    tokens = triton_rows.triton_combine(torch.full((4, 3), torch.nan), rows)
    assert torch.equal(tokens[0], torch.zeros(3))


# ---- hidden units ----


def hidden_problem(form, dtype, d_ff=11, counts=(0, 7, 0, 4, 2), num_unread=3):
    """Returns product, bias or None, counts, and the gradient of the hidden units."""
    torch.manual_seed(1)
    counts = torch.tensor(counts)
    num_rows = int(counts.sum()) + num_unread
    width = 2 * d_ff if form.gated else d_ff
    bias = None
    if form.bias_kind != "none":
        bias = torch.randn(d_ff, len(counts), dtype=dtype).T.requires_grad_()
    product = torch.randn(width, num_rows, dtype=dtype).T.requires_grad_()
    return product, bias, counts, torch.randn(d_ff, num_rows, dtype=dtype).T


def units_and_gradients(hidden, problem, form):
    """Returns hidden units of the rows that are read, and the gradients of product and bias."""
    product, bias, counts, d_hidden = problem
    num_rows = int(counts.sum())
    units = hidden(product, bias, counts, form)
    inputs = [x for x in (product, bias) if x is not None]

    # Whatever the gradient of the other rows: that of the bias does not know them.
    d_hidden = d_hidden.clone()
    d_hidden[num_rows:] = torch.nan if hidden is triton_hidden.triton_hidden else 0
    d_product, *d_bias = torch.autograd.grad(units, inputs, d_hidden)
    return [units[:num_rows].detach(), d_product[:num_rows], *d_bias]


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("activation", "gated", "bias_kind"), KINDS)
def test_hidden_units_equal_those_of_torch(activation, gated, bias_kind, dtype):
    form = ExpertForm(activation, gated, bias_kind, 0.0)
    problem = hidden_problem(form, dtype)
    ours = units_and_gradients(triton_hidden.triton_hidden, problem, form)
    assert_close(ours, units_and_gradients(hidden_rows, problem, form), dtype)


@pytest.mark.parametrize("counts", [(0, 0, 0), (3,), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("d_ff", [1, 1031])
def test_hidden_units_of_odd_sizes(counts, d_ff):
    form = ExpertForm("gelu", True, "multiplicative", 0.0)
    for num_unread in (0, 1):
        problem = hidden_problem(form, torch.float32, d_ff, counts, num_unread)
        ours = units_and_gradients(triton_hidden.triton_hidden, problem, form)
        assert_close(ours, units_and_gradients(hidden_rows, problem, form), torch.float32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, of numbers that overflow
@pytest.mark.parametrize("value", [-torch.inf, -1e4, -30.0, -0.0, 30.0, 1e4, torch.inf, torch.nan])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_activations_far_from_zero(activation, value):
    form = ExpertForm(activation, False, "none", 0.0)
    product = torch.full((1, 3), value, requires_grad=True)
    problem = (product, None, torch.tensor([1]), torch.ones(1, 3))
    ours = units_and_gradients(triton_hidden.triton_hidden, problem, form)
    theirs = units_and_gradients(hidden_rows, problem, form)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


# ---- dropout ----


@pytest.mark.parametrize(("activation", "gated", "bias_kind"), KINDS[1::2])
def test_the_backward_pass_draws_the_mask_of_the_forward_pass(activation, gated, bias_kind):
    form = ExpertForm(activation, gated, bias_kind, 0.3)
    product, bias, counts, d_hidden = hidden_problem(form, torch.float32, num_unread=0)
    torch.manual_seed(7)
    problem = (product.detach().abs().requires_grad_(), bias, counts, d_hidden)
    ours = units_and_gradients(triton_hidden.triton_hidden, problem, form)
    is_kept = ours[0] != 0
    assert 0 < is_kept.sum() < is_kept.numel()

    def hidden(product, bias, counts, form):
        units = hidden_rows(product, bias, counts, form._replace(dropout_rate=0.0))
        return units * is_kept / 0.7

    assert_close(ours, units_and_gradients(hidden, problem, form), torch.float32)


def test_dropout_drops_the_share_that_it_should_and_no_two_rows_alike():
    form = ExpertForm("relu", False, "none", 0.3)
    product = torch.ones(3, 1031)
    counts = torch.tensor([3])
    torch.manual_seed(3)
    first = triton_hidden.triton_hidden(product, None, counts, form)
    second = triton_hidden.triton_hidden(product, None, counts, form)
    torch.manual_seed(3)
    assert torch.equal(triton_hidden.triton_hidden(product, None, counts, form), first)
    assert set(first.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.7))}

    # Within five standard deviations of a binomial; neighbours are independent, and so are rows
    # and draws: of two units both are kept in 0.49 of all cases.
    kept = (first != 0).double()
    others = (kept.flatten().roll(1), kept.roll(1, 0).flatten(), (second != 0).double().flatten())
    assert abs(kept.mean() - 0.7) < 5 * (0.7 * 0.3 / kept.numel()) ** 0.5
    for other in others:
        share = (kept.flatten() * other).mean()
        assert abs(share - 0.49) < 5 * (0.49 * 0.51 / kept.numel()) ** 0.5


def test_the_mean_of_what_dropout_keeps_is_right_at_extreme_rates():
    form = ExpertForm("relu", False, "none", 0.9999)
    torch.manual_seed(3)
    product = torch.ones(16, 2**16)
    mean = triton_hidden.triton_hidden(product, None, torch.tensor([16]), form).double().mean()
    assert abs(mean - 1) < 5 * (0.9999 / 0.0001 / product.numel()) ** 0.5


# ---- layers ----


@pytest.mark.parametrize(
    ("router", "capacity"),
    [("token_choice", {}), *[(name, THREE_SLOTS) for name in ROUTER_NAMES]],
    ids=lambda value: value if isinstance(value, str) else "with slots" if value else "dropless",
)
def test_a_layer_computes_what_the_kernel_of_a_cpu_does(router, capacity):
    layer = build_layer(router, expert_bias="multiplicative", **capacity)
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    ids = torch.randint(0, 997, (2, 5))
    expected = losses_and_gradients(layer, x, mask, ids)
    try:
        use_row_operators("triton")
        dispatcher = layer.start_dispatcher(layer(x, token_ids=ids)[1].plan)
        assert isinstance(dispatcher, ChoiceDispatcher)
        assert_all_close(losses_and_gradients(layer, x, mask, ids), expected)
    finally:
        use_row_operators(None)


@pytest.mark.parametrize("shape", [(1, 1), (1, 0), (0, 13)], ids=["one", "none", "no sequence"])
def test_a_layer_of_padding(shape, on_triton):
    layer = build_layer(expert_bias="additive")
    x = torch.randn(*shape, 7, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x, torch.zeros(shape, dtype=torch.bool))
    assert y.shape == x.shape
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not y.any() and not gradient.any()


def training_layer(drop_rate=0.3):
    """Returns a layer in training, in float32, and an input."""
    layer = build_layer(expert_bias="additive", expert_dropout_rate=drop_rate, **THREE_SLOTS)
    return layer.float().train(), torch.randn(1, 5, 7, requires_grad=True)


def test_two_runs_give_equal_bits(on_triton):
    layer, x = training_layer()
    first = losses_and_gradients(layer, x)
    assert all(map(torch.equal, first, losses_and_gradients(layer, x)))


def test_checkpointing_drops_the_same_units_again(on_triton):
    layer, x = training_layer()
    expected = losses_and_gradients(layer, x)

    def checkpointed(x, *inputs, **options):
        return checkpoint(layer, x, *inputs, **options, use_reentrant=False)

    checkpointed.parameters = layer.parameters
    assert all(map(torch.equal, losses_and_gradients(checkpointed, x), expected))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_layer_compiles_into_one_graph(on_triton):
    layer, x = training_layer(drop_rate=0.0)  # graphs draw other numbers
    expected = losses_and_gradients(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(losses_and_gradients(compiled, x), expected, torch.float32)


def test_no_launch_waits_for_the_device(on_triton):
    """What tests/on_fake_gpu.py cannot see, since nothing is launched there."""
    layer = build_layer(d_model=8, d_ff=12, expert_bias="additive", expert_dropout_rate=0.3)
    layer.float().train()
    x = torch.randn(1, 3, 8, requires_grad=True)
    plan = layer(x)[1].plan  # a router on a CPU looks at its logits
    with NoSynchronisation():
        dispatcher = layer.start_dispatcher(plan)
        in_flight = dispatcher.dispatch(x.flatten(0, 1))
        dispatcher.combine(layer.experts(in_flight)).sum().backward()
    assert x.grad is not None and x.grad.any()


def test_second_derivatives_are_refused(on_triton):
    layer = build_layer()
    x = torch.randn(1, 3, 7, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_the_variant_of_the_benchmark_is_the_layer():
    problem = build_problem(Case(13, 8, 12, 3, 2), torch.float32, torch.device("cpu"))
    variants = build_variants(problem, ("moe_dropless", "moe_triton"), "here")
    assert [variant.name for variant in variants] == ["dense", "moe_dropless", "moe_triton"]
    assert 0 < compare_outputs(variants)["moe_triton"] < 1e-6  # two ways to the same


# ---- doors ----


def test_the_interpreter_refuses_what_it_computes_wrong(on_triton):
    layer = build_layer().bfloat16()
    with pytest.raises(ConfigError, match="takes the bits of bfloat16 for integers"):
        layer(torch.randn(1, 3, 7, dtype=torch.bfloat16))


def test_the_operators_are_what_they_say_to_compilers():
    """torch's own check of schemas, shapes, gradients and tracing."""
    rows = random_rows(3, 2, torch.float32)
    tokens = torch.randn(3, 5, requires_grad=True)
    outputs = torch.randn(6, 5, requires_grad=True)
    num_rows = torch.tensor(6)  # opcheck compares the rows that hold anything, too
    torch.library.opcheck(triton_rows._copy, (tokens, rows.row, num_rows, None, None))
    weight = rows.weight.requires_grad_()
    torch.library.opcheck(triton_rows._sum, (outputs, rows.row, num_rows, weight))

    form = ExpertForm("gelu", True, "additive", 0.3)
    product, bias, counts, _ = hidden_problem(form, torch.float32, 3, (0, 2, 1), num_unread=0)
    kind = (True, True, False, 0.3)
    arguments = (product, bias, counts.cumsum(0), torch.tensor(3), *kind)
    torch.library.opcheck(triton_hidden._hidden, arguments)
