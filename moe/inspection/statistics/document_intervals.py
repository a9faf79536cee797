"""Means of tokens with intervals over documents: the jackknife with Student's t.

Comes before `ablation_table`. Tokens of a document depend on each other, so a document is the unit.

Why t and not a bootstrap: a claim about one of hundreds of cells needs a confidence far beyond 95 %,
for which a bootstrap needs many thousands of draws; and with few documents its intervals are too narrow.
The t interval assumes that document means are nearly normal. Changes of loss are skewed to the right,
so with few documents its upper end is too low and its lower end is safe: effects are not claimed too
often, but may be ruled out too often.
"""

import math
from typing import NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor


class Estimate(NamedTuple):
    """A value and its interval.

    The value is NaN where there is no token; the ends are infinite where no spread is known.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        if math.isinf(self.low):
            return f"{self.value:+.4f}"
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


class Estimates(NamedTuple):
    """Estimates with standard errors, from which their intervals follow.

    Attributes:
        value: <float64>[...] NaN where there is no token.
        stderr: <float64>[...] NaN where one document holds all tokens.
        freedom: <int64>[...] degrees of freedom of Student's t.
    """

    value: Tensor
    stderr: Tensor
    freedom: Tensor

    def interval(self, confidence: float) -> tuple[Tensor, Tensor]:
        """Returns both ends <float64>[...]: infinite if the spread is unknown."""
        half = student_half_width(self.stderr, self.freedom, confidence).nan_to_num(math.inf)
        center = self.value.nan_to_num(0.0)
        return center - half, center + half

    def intervals(self, confidence: float) -> list[Estimate]:
        """Returns each estimate with its interval, in the order of the flattened values."""
        columns = (self.value, *self.interval(confidence))
        rows = torch.stack([column.flatten() for column in columns], dim=-1)
        return [Estimate(*row) for row in rows.tolist()]


class TokenSums(NamedTuple):
    """Sums over some tokens of each of G documents, of which a mean is computed.

    Attributes:
        sums: <float64>[..., G].
        counts: <float64>[..., G] number of tokens, of a broadcastable shape.
    """

    sums: Tensor
    counts: Tensor


def mean_over_tokens(tokens: TokenSums) -> Estimates:
    """Returns the mean over tokens, with the spread of documents."""
    return _jackknife(_leave_one_out(tokens), (tokens.counts > 0).sum(dim=-1))


def difference_of_means(a: TokenSums, b: TokenSums) -> Estimates:
    """Returns the mean over the tokens of `a` minus the mean over those of `b`, from the same
    documents.

    Effects of a document that both share cancel. The degrees of freedom come from the set with
    tokens in fewer documents.
    """
    num_documents = torch.minimum((a.counts > 0).sum(dim=-1), (b.counts > 0).sum(dim=-1))
    return _jackknife(_leave_one_out(a) - _leave_one_out(b), num_documents)


def student_half_width(stderr: Tensor, freedom: Tensor, confidence: float) -> Tensor:
    """Returns half the width of Student's interval.

    Args:
        stderr: <float64>[...] standard errors.
        freedom: <int64>[...] degrees of freedom.
        confidence: Share of intervals that contain the true value, e.g. 0.95.

    Returns:
        <float64>[...] NaN where the standard error is not finite or there is no degree of freedom.
    """
    quantile = torch.as_tensor(stdtrit(freedom.double().numpy(), (1 + confidence) / 2))
    is_known = stderr.isfinite() & (freedom > 0)
    return (quantile * stderr).masked_fill(~is_known, math.nan)


def _leave_one_out(tokens: TokenSums) -> Tensor:
    """Returns <float64>[..., 1 + G]: the mean, and the mean without each of the documents."""
    sums, counts = torch.broadcast_tensors(*tokens)
    total = sums.sum(dim=-1, keepdim=True)
    total_count = counts.sum(dim=-1, keepdim=True)
    sums_left = torch.cat([total, total - sums], dim=-1)
    counts_left = torch.cat([total_count, total_count - counts], dim=-1)
    return sums_left / counts_left


def _jackknife(values: Tensor, num_documents: Tensor) -> Estimates:
    """Returns the estimates of values <float64>[..., 1 + G] by `_leave_one_out`.

    Args:
        values: The mean over all documents, then without each one.
        num_documents: <int64>[...] documents from which the spread is estimated.
    """
    value = values[..., 0]
    num_documents = num_documents.expand(value.shape)

    # Around the estimate itself: a little wider than around the mean of the replicates. A document
    # that holds none of the tokens changes nothing when it is left out.
    squares = (values[..., 1:] - value[..., None]).square().sum(dim=-1)
    variance = squares * (num_documents - 1) / num_documents
    return Estimates(value, variance.sqrt(), num_documents - 1)
