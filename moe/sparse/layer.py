"""The sparse feed-forward layer: the whole journey in one forward."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe.checks import check
from moe.distributed.collectives import copy_to_tp_region, reduce_from_tp_region
from moe.distributed.mesh import ExpertAxis
from moe.sparse.config import SparseConfig
from moe.sparse.dispatch import combine_slots, dispatch_slots, fill_slots, sort_rows
from moe.sparse.expert_parallel import start_ragged, start_static
from moe.sparse.experts import Experts
from moe.sparse.groups import from_groups, sequences_per_group, to_groups, tokens_per_group
from moe.sparse.inputs import check_inputs, to_bool_mask
from moe.sparse.losses import BalanceTotals, RouterLosses, balance_within
from moe.sparse.plan import DispatchPlan
from moe.sparse.router import RouterInputs, build_router
from moe.sparse.scores import RouterScores
from moe.sparse.stats import RouterStats, router_stats


class RouterOutput(NamedTuple):
    """What a sparse layer returns beside its output.

    Attributes:
        router_logits: <float32>[G, S, E].
        plan: Which token went where.
        losses: Auxiliary losses, unweighted, with gradient.
        stats: Sums and counts, without gradient.
    """

    router_logits: Tensor
    plan: DispatchPlan
    losses: RouterLosses
    stats: RouterStats

    def within(self, totals: BalanceTotals) -> "RouterOutput":
        """Returns the same as a part of a wider scope of the balance loss; see `balance_within`."""
        losses = balance_within(self.losses, totals)
        balance, count = (
            losses.load_balance_sum.detach().double(),
            losses.load_balance_count.double(),
        )
        stats = self.stats._replace(load_balance_sum=balance, load_balance_count=count)
        return self._replace(losses=losses, stats=stats)


class SparseFeedForward(nn.Module):
    """A feed-forward layer in which every token uses a few of E experts; fits any Transformer's
    feed-forward slot.

    Example:
        layer = SparseFeedForward(SparseConfig(d_model=512, d_ff=2048, num_experts=8))
        y, router = layer(x, token_mask)
        loss = task_loss + 0.01 * router.losses.load_balance_loss + 0.001 *
        router.losses.router_z_loss

    Source:
        ST-MoE (arXiv:2202.08906) §2 and §3. Differs: padding is never routed.
    """

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        check(
            isinstance(config, SparseConfig), "config of a sparse layer", config, "a SparseConfig"
        )
        self.config = config
        self.router = build_router(config)
        self.experts = Experts(config)
        self.ep: ExpertAxis | None = None
        self.tp: ProcessGroup | None = None

    def spread(self, ep: ExpertAxis | None, tp: ProcessGroup | None) -> None:
        """Tells the layer where its experts are; their parameters are cut by
        `moe.distributed.sharding`.

        Args:
            ep: Ranks that hold E / ep experts each; None when all are here.
            tp: Ranks that hold F / tp hidden units of each expert here and see the same tokens;
                None likewise.
        """
        self.ep, self.tp = ep, tp

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        *,
        token_ids: Tensor | None = None,
        word_embeddings: Tensor | None = None,
        drop_tokens: bool = True,
        report: bool = True,
    ) -> tuple[Tensor, RouterOutput | None]:
        """Returns the layer's output and what its router did.

        A token that reaches no expert, and padding, come out as zeros: only the residual path
        carries them.

        Args:
            x: <any float>[B, L, D] tokens.
            token_mask: <bool>[B, L] real tokens, or 0 and 1 of any dtype; None means that all are.
                Additive masks are refused, see `to_bool_mask`.
            token_ids: <any integer>[B, L] vocabulary ids, for router `hash`.
            word_embeddings: <any float>[B, L, D] embeddings of those ids, for `router_input` other
                than `hidden`.
            drop_tokens: False ignores the capacity factor, so that no token is lost (incremental
                decoding).
            report: False spares losses and statistics, and None stands for what the router did.

        Returns:
            <dtype of x>[B, L, D], and the RouterOutput.

        Raises:
            DataError: When a shape or dtype does not fit, an input that the router needs is
                missing, or the router's logits are not finite.
        """
        check_inputs(x, token_mask, token_ids, word_embeddings, d_model=self.config.d_model)
        token_mask = None if token_mask is None else to_bool_mask(token_mask)
        sequences = sequences_per_group(x.shape[0], x.shape[1], tokens_per_group(self.config))
        tokens, mask, ids, words = (
            None if value is None else to_groups(value, sequences)
            for value in (x, token_mask, token_ids, word_embeddings)
        )
        assert tokens is not None, "x is given"
        real = (
            torch.ones(tokens.shape[:2], dtype=torch.bool, device=x.device)
            if mask is None
            else mask
        )

        scores = self.router(RouterInputs(tokens, mask, ids, words))
        plan = self.router.assign(scores, real, drop_tokens=drop_tokens)
        finish = self.start_experts(
            tokens, plan
        )  # with experts on other ranks, rows travel while the losses are made
        output = self._report(scores, plan) if report else None
        return from_groups(finish(), sequences).to(x.dtype), output

    def _report(self, scores: RouterScores, plan: DispatchPlan) -> RouterOutput:
        """Returns what the router did."""
        losses = self.router.losses(scores, plan)
        return RouterOutput(scores.logits, plan, losses, router_stats(scores, plan, losses))

    def start_experts(self, tokens: Tensor, plan: DispatchPlan) -> Callable[[], Tensor]:
        """Dispatches tokens <any float>[G, S, D] and returns a function that runs the experts and
        combines.

        That function returns <any float>[G, S, D].
        """
        wrapped: Any = self.experts  # by an adapter of PEFT, perhaps
        experts = wrapped.get_base_layer() if hasattr(wrapped, "get_base_layer") else wrapped
        flat = copy_to_tp_region(tokens.flatten(0, 1).to(experts.product_dtype()), self.tp)
        plan = plan._replace(combine_weight=copy_to_tp_region(plan.combine_weight, self.tp))
        if self.ep is None:
            start = partial(self._run_here, flat, plan)
        else:
            exchange = start_ragged if self.config.dispatch == "ragged" else start_static
            start = exchange(flat, plan, self.config.num_experts, self.experts, self.ep)
        return lambda: reduce_from_tp_region(start(), self.tp).unflatten(0, tokens.shape[:2])

    def _run_here(self, flat: Tensor, plan: DispatchPlan) -> Tensor:
        """Returns <any float>[T, D]: dispatch, experts and combine of tokens <any float>[T, D] on
        this rank.
        """
        if self.config.dispatch == "ragged":
            return self.experts(flat, sort_rows(plan, self.config.num_experts))
        slots = fill_slots(plan, self.config.num_experts)
        return combine_slots(self.experts(dispatch_slots(flat, slots)), slots, flat.shape[0])
