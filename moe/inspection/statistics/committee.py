"""The standing committee: experts that work in every kind of text.

Comes after token_classes.py. Whether kinds of text are routed differently at all stands in
`Committee.silhouette`: near 0, a table of experts by domain is noise.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.checks import check_integer, check_number
from moe.errors import DataError
from moe.sparse.editing import LayerKey, Stack
from moe.tracing.trace import LayerTrace, Trace

_LEAST_DOCUMENTS = 2
_NO_DISTANCE = 1e-12


class Committee(NamedTuple):
    """The standing committee of one layer.

    Attributes:
        layer: Its stack and number.
        domains: The D kinds of text.
        contribution: <float64>[D, E] mean over tokens of each expert's combine weight.
        rank: <int64>[D, E] rank of an expert in a domain, from 1; `num_ranked` + 1 where it is not
            among the first.
        members: Experts of the committee, those of the largest contribution first.
        coverage: Their share of the contribution, mean over domains; 0 without members.
        ratio: Mean contribution of a member over that of another expert; NaN where all or none are
            members, infinite where the others contribute nothing.
        silhouette: From -1 to 1: how much more alike the routing of documents is within a domain
            than between domains; NaN with fewer than two documents in each of two domains.
    """

    layer: LayerKey
    domains: tuple[str, ...]
    contribution: Tensor
    rank: Tensor
    members: tuple[int, ...]
    coverage: float
    ratio: float
    silhouette: float


def standing_committees(
    trace: Trace, stack: Stack, *, num_ranked: int | None = None, min_presence: float = 0.8
) -> list[Committee]:
    """Returns the standing committee of each sparse layer of a stack.

    In each domain the experts are ranked by their contribution. Of those that are among the first
    `num_ranked` in most domains, the committee are those that no other one beats in both the mean
    and the variance of the rank.

    Args:
        trace: Where the tokens went; of several domains.
        stack: `encoder` or `decoder`.
        num_ranked: Experts of a domain's ranking; None for half of those of the layer. More make a
            larger committee.
        min_presence: Share of the domains in which an expert must be ranked.

    Raises:
        ConfigError: When an option is out of range.
        DataError: When the trace has tokens of fewer than two domains.

    Source:
        The Illusion of Specialization (arXiv:2601.03425): contribution index, ranks, Pareto front.
        Differs: the combine weight of a refused choice is 0.
    """
    # What text there is.
    check_number("min_presence", min_presence, above=0, most=1)
    part = trace.stack(stack)
    document = trace.document.long()[part.example]  # [N]
    domain = trace.domain.long()[part.example]
    present = domain.unique()
    if len(present) < 2:
        raise DataError(
            f"The trace has tokens of {len(present)} kinds of text; a standing committee is of at least 2. Trace texts "
            "of several domains."
        )

    committees = []
    for layer in part.layers:
        num_experts = layer.facts.num_experts
        ranked = max(1, num_experts // 2) if num_ranked is None else num_ranked
        reason = f"the layer has {num_experts} experts"
        check_integer("num_ranked", ranked, least=1, most=num_experts, reason=reason)

        # Contribution of experts, in all domains that have tokens.
        gates = expert_gates(layer)  # [N, E]
        contribution = _mean_by_group(gates, domain)[present]  # [D, E]
        rank = _ranks(contribution, ranked)
        members = _committee(contribution, rank, ranked, min_presence)

        names = [trace.facts.domains[number] or "text" for number in present.tolist()]
        committees.append(
            Committee(
                layer=layer.key,
                domains=tuple(names),
                contribution=contribution,
                rank=rank,
                members=members,
                coverage=_coverage(contribution, members),
                ratio=_ratio(contribution, members),
                silhouette=domain_silhouette(gates, domain, document),
            )
        )
    return committees


def expert_gates(layer: LayerTrace) -> Tensor:
    """Returns <float64>[N, E]: the combine weight of each expert for each token."""
    gates = torch.zeros(len(layer.expert), layer.facts.num_experts, dtype=torch.float64)
    return gates.scatter_add(1, layer.expert.long(), layer.gate.double())


def _mean_by_group(values: Tensor, group: Tensor) -> Tensor:
    """Returns <float64>[G, E]: the mean of rows <float64>[N, E] in each group <int64>[N]."""
    num_groups = int(group.max()) + 1
    sums = torch.zeros(num_groups, values.shape[1], dtype=torch.float64)
    sums.index_add_(0, group, values)
    return sums / torch.bincount(group, minlength=num_groups)[:, None]


def _ranks(contribution: Tensor, num_ranked: int) -> Tensor:
    """Returns <int64>[D, E]: ranks by falling contribution <float64>[D, E]; see `Committee`.

    Equal contributions have the same rank, and none is no rank.
    """
    ascending = (-contribution).sort(dim=1).values
    rank = torch.searchsorted(ascending, -contribution) + 1

    # Those that are not ranked come after all that are.
    unranked = num_ranked + 1
    rank = rank.masked_fill(contribution <= 0, unranked)
    return rank.clamp(max=unranked)


def _committee(
    contribution: Tensor, rank: Tensor, num_ranked: int, min_presence: float
) -> tuple[int, ...]:
    """Returns the experts of the Pareto front of mean and variance of the rank."""
    presence = (rank <= num_ranked).double().mean(dim=0)  # [E]
    is_candidate = presence >= min_presence
    mean = rank.double().mean(dim=0)
    variance = rank.double().var(dim=0, correction=0)

    # No other candidate is as good in both and better in one.
    is_member = is_candidate.clone()
    for expert in is_candidate.nonzero().flatten().tolist():
        by_mean = mean - mean[expert]  # [E]
        by_variance = variance - variance[expert]
        is_as_good = (by_mean <= 0) & (by_variance <= 0)
        is_better = (by_mean < 0) | (by_variance < 0)
        is_beaten = is_candidate & is_as_good & is_better
        is_member[expert] = not is_beaten.any()

    # Those of the largest contribution first.
    total = contribution.sum(dim=0)
    order = total.argsort(descending=True, stable=True)
    return tuple(order[is_member[order]].tolist())


def _coverage(contribution: Tensor, members: tuple[int, ...]) -> float:
    """Returns the members' share of the contribution <float64>[D, E], mean over domains."""
    share = contribution / contribution.sum(dim=1, keepdim=True)
    return float(share[:, list(members)].sum(dim=1).mean())


def _ratio(contribution: Tensor, members: tuple[int, ...]) -> float:
    """Returns a member's mean contribution over that of another expert."""
    is_member = torch.zeros(contribution.shape[1], dtype=torch.bool)
    is_member[list(members)] = True
    if is_member.all() or not is_member.any():
        return math.nan

    # Over domains and experts.
    mean = contribution.mean(dim=0)
    return float(mean[is_member].mean() / mean[~is_member].mean())


def domain_silhouette(gates: Tensor, domain: Tensor, document: Tensor) -> float:
    """Returns how much more alike documents of a domain are routed than those of others.

    The mean silhouette of documents, each as the mean of its tokens' gates, by cosine distance.

    Args:
        gates: <float64>[N, E] combine weights.
        domain: <int64>[N] kind of text of each token; a document is of one.
        document: <int64>[N] document of each token.

    Returns:
        From -1 to 1, 0 for no difference; NaN unless two domains have two documents each.

    Source:
        Rousseeuw, Silhouettes (1987).
    """
    # Documents, and the domain of each.
    distinct, row = document.unique(return_inverse=True)
    group = torch.zeros(len(distinct), dtype=torch.int64)
    group[row] = domain
    sizes = torch.bincount(group)
    if int((sizes >= _LEAST_DOCUMENTS).sum()) < 2:
        return math.nan

    # The sum of cosine distances 1 - x y to the documents of each domain: n - x (sum of y).
    means = _mean_by_group(gates, row)
    direction = F.normalize(means, dim=1)  # [documents, E]
    domains = F.one_hot(group, len(sizes)).double()
    to_domain = sizes - direction @ (direction.T @ domains)  # [documents, domains]

    # A: mean distance to the own domain; B: to the nearest other.
    to_itself = 1 - direction.square().sum(dim=1)
    own = to_domain.gather(1, group[:, None]).squeeze(1) - to_itself
    a = own / (sizes[group] - 1).clamp(min=1)
    others = to_domain / sizes
    others = others.masked_fill((domains > 0) | (sizes == 0), math.inf)
    b = others.amin(dim=1)

    # A document alone in its domain counts 0, and so does one that is like all others.
    widest = torch.maximum(a, b)
    is_alone = sizes[group] < _LEAST_DOCUMENTS
    is_same = is_alone | (widest < _NO_DISTANCE)
    silhouette = ((b - a) / widest).masked_fill(is_same, 0)
    return float(silhouette.mean())
