"""Rows of a fixed number, as compiled graphs have them, against rows that are counted."""

import pytest
import torch

from moe.kernels.hidden_units import expert_of_rows
from moe.sparse.dispatch import ChoiceDispatcher, RowDispatcher, pad_rows, sort_choices, sort_rows
from tests.sparse.layers import THREE_SLOTS, build_layer

AOT_EAGER = {"backend": "aot_eager"}
INDUCTOR = {"options": {"cpp.simdlen": 1}}  # plain loops take half as long to compile


def a_plan(router="token_choice") -> tuple:
    """Returns a layer, its tokens [T, D] and their plan, which refuses choices."""
    layer = build_layer(router, **THREE_SLOTS)
    x = torch.randn(2, 13, 7, dtype=torch.float64)
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[1, 9:] = False
    ids = torch.randint(100, (2, 13))
    _, output = layer(x, mask, token_ids=ids)
    return layer, x.flatten(0, 1), output.plan


@pytest.mark.parametrize("router", ["token_choice", "expert_choice", "hash"])
def test_the_rows_of_experts_come_first_and_in_their_order(router):
    layer, _, plan = a_plan(router)
    num_experts = layer.config.num_experts
    counted = sort_rows(plan, num_experts)
    padded = pad_rows(plan, num_experts)
    num_rows = counted.token.numel()
    assert padded.token.numel() == plan.accepted.numel() > num_rows
    assert torch.equal(padded.counts, counted.counts)
    assert torch.equal(padded.token_start, counted.token_start)
    for name in ("token", "weight", "by_token"):
        assert torch.equal(getattr(padded, name)[:num_rows], getattr(counted, name))
    assert not padded.weight[num_rows:].any()


class Unwritten(torch.autograd.Function):
    """Leaves the rows behind the last expert's as memory happens to be, as a GPU's products do."""

    @staticmethod
    def forward(ctx, outputs, num_rows):
        ctx.num_rows = num_rows
        outputs = outputs.clone()
        outputs[num_rows:] = torch.nan
        return outputs

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[ctx.num_rows :] = torch.nan
        return gradient, None


def test_what_stands_in_rows_that_nobody_reads_reaches_no_token_and_no_gradient():
    layer, tokens, plan = a_plan()
    tokens.requires_grad_()
    num_experts = layer.config.num_experts
    num_rows = int(plan.accepted.sum())
    results = []
    for dispatcher in (
        RowDispatcher(sort_rows(plan, num_experts)),
        ChoiceDispatcher(sort_choices(plan, num_experts)),
    ):
        rows = dispatcher.dispatch(tokens).wait()
        x = Unwritten.apply(rows.x, num_rows)
        expert = expert_of_rows(rows.ends, num_rows)
        factor = torch.ones(x.shape[0], 1, dtype=x.dtype)
        factor[:num_rows, 0] += expert
        output = dispatcher.combine(Unwritten.apply(x * factor, num_rows))
        (gradient,) = torch.autograd.grad(output.square().sum(), tokens)
        results.append((output, gradient))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)
    assert results[0][1].any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
@pytest.mark.parametrize(
    ("dtype", "d_model", "d_ff", "compiler"),
    [(torch.float32, 7, 11, AOT_EAGER), (torch.bfloat16, 8, 16, INDUCTOR)],
    ids=["a loop", "code for bfloat16"],
)
def test_grouped_products_of_padded_rows_compile_into_one_graph(dtype, d_model, d_ff, compiler):
    """The path of a GPU, run on the products that torch has for a CPU."""
    fields = {"d_model": d_model, "d_ff": d_ff, "expert_bias": "additive", **THREE_SLOTS}
    layer = build_layer("token_choice", **fields).to(dtype)
    x = torch.randn(2, 13, d_model, dtype=dtype)
    expected, output = layer(x)
    plan = output.plan._replace(combine_weight=output.plan.combine_weight.detach())
    inputs = [x.flatten(0, 1).requires_grad_(), *layer.experts.parameters()]

    def run(tokens, plan):
        dispatcher = ChoiceDispatcher(sort_choices(plan, 5))
        return dispatcher.combine(layer.experts(dispatcher.dispatch(tokens)))

    torch.compiler.reset()
    results = []
    for forward in (run, torch.compile(run, fullgraph=True, **compiler)):
        combined = forward(inputs[0], plan)
        results.append([combined, *torch.autograd.grad(combined.square().sum(), inputs)])
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    for eager, compiled in zip(*results, strict=True):
        scale = max(1.0, float(eager.detach().abs().max()))
        torch.testing.assert_close(compiled, eager, rtol=0, atol=tolerance * scale)
    combined = results[1][0].unflatten(0, (2, 13))
    torch.testing.assert_close(combined, expected, rtol=0, atol=tolerance)
