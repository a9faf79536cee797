"""Rows of experts in round numbers: few numbers, little added, and nothing changed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.kernels import cpu_experts
from moe.kernels.cpu_matmul import prepares_for_row_counts
from moe.kernels.expert_rows import round_up_rows, rounded_count
from tests.sparse.expert_loop import expert_rows, form_of, tiny, weights_of


@given(st.integers(0, 2**40))
def test_a_sixteenth_is_added_at_most(count):
    rounded = rounded_count(count)
    assert count <= rounded <= count + count / 16
    assert rounded_count(rounded) == rounded


def test_numbers_of_rows_are_few():
    assert len({rounded_count(count) for count in range(2**13 + 1)}) == 65 + 7 * 16


counts_of_experts = st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any)


@settings(max_examples=25)
@given(counts=counts_of_experts, seed=st.integers(0, 99))
def test_every_row_keeps_its_token_and_its_weight(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    expert_of_row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    token_of_row = torch.randint(13, (sum(counts),), generator=generator).tolist()
    rows = expert_rows(expert_of_row, token_of_row, len(counts), num_tokens=13)
    rounded = round_up_rows(rows)
    assert rounded.counts.tolist() == [rounded_count(count) for count in counts]

    # By expert: its rows, then its last token without a weight.
    parts = (rounded.token, rounded.weight)
    pieces = [part.split(rounded.counts.tolist()) for part in parts]
    own = [part.split(counts) for part in (rows.token, rows.weight)]
    for expert, count in enumerate(counts):
        token, weight = (piece[expert] for piece in pieces)
        assert torch.equal(token[:count], own[0][expert])
        assert torch.equal(weight[:count], own[1][expert])
        assert not weight[count:].any()
        assert set(token[count:].tolist()) <= set(token[:count].tolist()[-1:])

    # A token reads its own rows.
    outputs = torch.randn(rounded.token.numel(), 3, generator=generator).double()
    expected = torch.zeros(13, 3).double()
    expected.index_add_(0, rounded.token, outputs * rounded.weight[:, None])
    assert torch.allclose(rounded.sum_by_token(outputs, weighted=True), expected, atol=1e-12)


def test_round_numbers_stay_as_they_are():
    rows = expert_rows([0] * 64 + [1] * 128, [3] * 192, 3, num_tokens=5)
    assert round_up_rows(rows) is rows


@pytest.mark.parametrize("bias", ["none", "additive", "product"])
def test_outputs_and_all_gradients_are_those_of_the_rows_alone(bias, monkeypatch):
    torch.manual_seed(0)
    config = tiny("gelu_pytorch_tanh", True, bias, num_experts=3, d_model=7, d_ff=11)
    expert_of_row = [0] * 67 + [1] * 301
    token_of_row = torch.randint(97, (368,)).tolist()
    rows = expert_rows(expert_of_row, token_of_row, 3, num_tokens=97)
    shapes = [(97, 7), (368,), (3, 22, 7), (3, 7, 11)]
    shapes += {"none": [], "additive": [(3, 11)], "product": [(3, 22), (3, 7)]}[bias]
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]

    results = []
    for is_rounded in (False, True):
        monkeypatch.setattr(cpu_experts, "prepares_for_row_counts", lambda _, r=is_rounded: r)
        tokens, weight, *stacked = inputs
        weights = weights_of(config, stacked)
        output = cpu_experts.fused_feed_forward(
            tokens, rows._replace(weight=weight), weights, form_of(config, 0.0)
        )
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for alone, rounded in zip(*results, strict=True):
        torch.testing.assert_close(rounded, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
def test_products_in_16_bits_get_round_numbers():
    assert prepares_for_row_counts(torch.bfloat16) and prepares_for_row_counts(torch.float16)
    assert not prepares_for_row_counts(torch.float64)
