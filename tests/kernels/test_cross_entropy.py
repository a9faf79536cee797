"""The sums over a vocabulary, against torch's own cross-entropy and logsumexp in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.kernels import cross_entropy
from moe.kernels.cross_entropy import vocabulary_losses


def inputs(num_rows, vocab_size, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator).mul(3).to(dtype)
    labels = torch.randint(vocab_size, (num_rows,), generator=generator)
    is_target = torch.rand(num_rows, generator=generator) < 0.7
    return logits.requires_grad_(), labels, is_target


def oracle(logits, labels, is_target, label_smoothing=0.0):
    """Returns both sums from torch's own operations on the targets alone."""
    logits = logits[is_target]
    ce = F.cross_entropy(
        logits, labels[is_target], label_smoothing=label_smoothing, reduction="sum"
    )
    return ce, logits.logsumexp(dim=-1).square().sum()


def weighted(sums):
    return 0.7 * sums[0] + 0.3 * sums[1]


@settings(max_examples=40)
@given(
    num_rows=st.integers(0, 9),
    vocab_size=st.integers(1, 40),
    piece_size=st.integers(1, 100),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_sums_and_gradient_are_those_of_torch_in_pieces_of_any_size(
    num_rows, vocab_size, piece_size, smoothing
):
    logits, labels, is_target = inputs(num_rows, vocab_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "_PIECE_SIZE", piece_size)
        sums = vocabulary_losses(logits, labels, is_target, smoothing)
        (gradient,) = torch.autograd.grad(weighted(sums), logits)
    expected = oracle(logits, labels, is_target, smoothing)
    torch.testing.assert_close(tuple(sums), expected, rtol=1e-12, atol=1e-12)
    (theirs,) = torch.autograd.grad(weighted(expected), logits)
    torch.testing.assert_close(gradient, theirs, rtol=1e-12, atol=1e-12)


NUMBERS = st.sampled_from([-math.inf, math.inf, math.nan, *range(-3, 4)])


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.lists(NUMBERS, min_size=5, max_size=5), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=7,
    ),
    z_weight=st.sampled_from([0.0, 0.3]),
    smoothing=st.sampled_from([0.0, 0.1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    plain=st.booleans(),
)
def test_infinite_and_nan_logits_give_the_loss_and_gradient_of_torch_on_the_targets(
    rows, z_weight, smoothing, dtype, plain
):
    logits = torch.tensor([row for row, _, _ in rows]).to(dtype).requires_grad_()
    labels = torch.tensor([label for _, label, _ in rows])
    is_target = torch.tensor([is_target for _, _, is_target in rows])

    # The oracle leaves out rows without a target, whose gradient is zero.
    wide = logits.detach().float().requires_grad_()
    losses = cross_entropy._plain_losses if plain else vocabulary_losses
    ours = losses(logits, labels, is_target, smoothing)
    theirs = oracle(wide, labels, is_target, smoothing)
    (gradient,) = torch.autograd.grad(ours.cross_entropy + z_weight * ours.z, logits)
    (expected,) = torch.autograd.grad(theirs[0] + z_weight * theirs[1], wide)
    torch.testing.assert_close(ours.cross_entropy, theirs[0], equal_nan=True)
    torch.testing.assert_close(gradient, expected.to(dtype), equal_nan=True)
    if not theirs[0].isnan():  # else some logsumexp is not finite
        torch.testing.assert_close(ours.z, theirs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_are_summed_in_float32(dtype):
    logits, labels, is_target = inputs(301, 53, dtype)
    sums = vocabulary_losses(logits, labels, is_target, 0.1)
    assert sums.cross_entropy.dtype == sums.z.dtype == torch.float32
    wide = logits.detach().double().requires_grad_()
    expected = oracle(wide, labels, is_target, 0.1)
    torch.testing.assert_close(torch.stack(sums).double(), torch.stack(expected), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(weighted(sums), logits)
    (theirs,) = torch.autograd.grad(weighted(expected), wide)
    assert gradient.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), theirs, rtol=2 * eps, atol=1e-6)


def test_gradients_have_gradients():
    logits, labels, is_target = inputs(5, 7)

    def sums(logits):
        return tuple(vocabulary_losses(logits, labels, is_target, 0.1))

    assert torch.autograd.gradgradcheck(sums, (logits,))


@pytest.mark.slow
def test_compilers_and_transforms_see_operations_that_they_know():
    logits, labels, is_target = inputs(6, 11, torch.float32)
    sums = vocabulary_losses(logits, labels, is_target)
    compiled = torch.compile(vocabulary_losses, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits, labels, is_target), sums)
    gradient = torch.func.grad(lambda x: weighted(vocabulary_losses(x, labels, is_target)))
    (expected,) = torch.autograd.grad(weighted(sums), logits)
    torch.testing.assert_close(gradient(logits.detach()), expected)
