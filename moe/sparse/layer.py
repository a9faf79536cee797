"""The sparse feed-forward layer: all steps of a token in one forward."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe.distributed.collectives import copy_to_tp_region, reduce_from_tp_region
from moe.distributed.mesh import ExpertAxis
from moe.distributed.random_numbers import tp_random_numbers
from moe.errors import ConfigError
from moe.kernels.torch_private import is_exporting, is_in_functorch
from moe.sparse.adapters import read_adapters, unwrapped
from moe.sparse.all_routers import build_router
from moe.sparse.config import SparseConfig
from moe.sparse.dispatch import (
    Arrived,
    Dispatcher,
    SlotDispatcher,
    fill_slots,
    local_row_dispatcher,
    sort_rows,
)
from moe.sparse.examples import example_starts
from moe.sparse.expert_parallel import RowExchange, exchange_slots
from moe.sparse.experts import Experts
from moe.sparse.groups import from_groups, sequences_per_group, to_groups, tokens_per_group
from moe.sparse.inputs import check_inputs, to_bool_mask
from moe.sparse.losses import BalanceTotals, RouterLosses, balance_within
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.sparse.router import RouterInputs
from moe.sparse.stats import RouterStats, router_stats

PlanEdit = Callable[[RouterScores, DispatchPlan], DispatchPlan]
"""Changes a router's plan before dispatch; see `moe.sparse.editing`."""


class RouterOutput(NamedTuple):
    """Results of a sparse layer in addition to its output.

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
        # The statistics report the loss of the wider scope, too.
        losses = balance_within(self.losses, totals)
        stats = self.stats._replace(
            load_balance_sum=losses.load_balance_sum.detach().double(),
            load_balance_count=losses.load_balance_count.double(),
        )
        return self._replace(losses=losses, stats=stats)


class SparseFeedForward(nn.Module):
    """A feed-forward layer in which every token uses a few of E experts.

    It fits where any Transformer has its feed-forward layer; see also integration.py. Shared experts
    are computed like a dense layer, and their output is added.

    Example:
        layer = SparseFeedForward(SparseConfig(d_model=512, d_ff=2048, num_experts=8))
        y, router_output = layer(x, token_mask)
        losses = router_output.losses
        loss = task_loss + 0.01 * losses.load_balance_loss + 0.001 * losses.router_z_loss

    Source:
        ST-MoE (arXiv:2202.08906) §2 and §3. Differs: padding is never routed. Shared experts:
        DeepSeekMoE (arXiv:2401.06066) eq. 9.
    """

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.config = config
        self.router = build_router(config)
        self.experts = Experts(config)
        self.shared_experts: Experts | None = None
        if config.num_shared_experts:
            self.shared_experts = Experts(config.as_shared_experts())
        self.ep: ExpertAxis | None = None
        self.tp: ProcessGroup | None = None
        self.plan_edits: tuple[PlanEdit, ...] = ()

    def set_parallel_axes(self, ep: ExpertAxis | None, tp: ProcessGroup | None) -> None:
        """Sets the ranks that share the experts; `moe.distributed.sharding` shards the parameters.

        Args:
            ep: Ranks that hold E / ep experts each; None when all are here.
            tp: Ranks that hold F / tp hidden units of each expert here and see the same tokens;
                None likewise.

        Raises:
            ConfigError: When hidden units are shared, and the products have biases.
        """
        if tp is not None and self.config.product_bias:
            raise ConfigError(
                "product_bias is True, and each rank of tp would add the bias. Use ep instead of tp."
            )
        self.ep = ep
        self.tp = tp

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        *,
        token_ids: Tensor | None = None,
        word_embeddings: Tensor | None = None,
        segment_ids: Tensor | None = None,
        prefix_numbers: Tensor | None = None,
        drop_tokens: bool = True,
        report: bool = True,
    ) -> tuple[Tensor, RouterOutput | None]:
        """Returns the layer's output and the router's results.

        A token that reaches no expert, and padding, are zeros in the output: only the residual path
        carries them. With shared experts, that is padding alone.

        Args:
            x: <any float>[B, L, D] tokens.
            token_mask: <bool>[B, L] real tokens, or 0 and 1 of any dtype; None means that all are.
                Additive masks raise an error, see `to_bool_mask`.
            token_ids: <any integer>[B, L] vocabulary ids, for router `hash`.
            word_embeddings: <any float>[B, L, D] embeddings of those ids, for `router_input` other
                than `hidden`.
            segment_ids: <int64>[B, L] example of each token, 0 for padding, for router `pools`;
                None when each sequence is one example.
            prefix_numbers: <int64>[B, L] number of the prefix of each token's example, from 1, or 0;
                None for 0.
            drop_tokens: False ignores every setting of capacity, so that no token is lost
                (incremental decoding).
            report: False skips losses and statistics, and returns None for the router's results.

        Returns:
            <dtype of x>[B, L, D], and the RouterOutput.

        Raises:
            DataError: When a shape or dtype does not fit, an input that the router needs is
                missing, or the router's logits are not finite.
        """
        # Tokens of whole sequences, side by side in groups.
        inputs = RouterInputs(x, token_mask, token_ids, word_embeddings, prefix_numbers)
        check_inputs({**inputs._asdict(), "segment_ids": segment_ids}, self.config.d_model)
        batch, length, _ = x.shape
        sequences = sequences_per_group(batch, length, tokens_per_group(self.config))
        inputs = group_inputs(inputs, sequences)
        router = unwrapped(self.router)
        if router.needs_starts and self.training:
            mask = from_groups(real_tokens(inputs), sequences)  # [B, L]
            starts = to_groups(example_starts(mask, segment_ids), sequences)
            inputs = inputs._replace(starts=starts)

        # Scores of every expert for every token, and the resulting plan.
        scores = self.router(inputs)  # logits [G, S, E]
        is_real = real_tokens(inputs)  # [G, S]
        plan = router.assign(scores, is_real, drop_tokens=drop_tokens)
        for edit in self.plan_edits:
            plan = edit(scores, plan)

        # To the experts; from other ranks rows arrive while the losses are computed.
        dispatcher = self.start_dispatcher(plan)
        tokens = self.expert_tokens(inputs.tokens)  # [T, D]
        in_flight = dispatcher.dispatch(tokens)
        router_output = self._report(scores, plan) if report else None

        # Through the experts, and back to the tokens.
        experts, adapters = read_adapters(self.experts, self.config.num_experts, self.ep)
        rate = self.config.expert_dropout_rate if self.training else 0.0
        with tp_random_numbers(self.tp, x.device, rate):
            shared = self.run_shared(tokens, is_real)  # [T, D]
            expert_outputs = experts(in_flight, adapters)  # rows, slots or, fused, tokens
        combined = dispatcher.combine(expert_outputs)  # [T, D]
        if shared is not None:
            combined = combined + shared
        combined = reduce_from_tp_region(combined, self.tp)
        combined = combined.unflatten(0, inputs.tokens.shape[:2])  # [G, S, D]
        return from_groups(combined, sequences).to(x.dtype), router_output

    def start_dispatcher(self, plan: DispatchPlan) -> Dispatcher:
        """Returns the dispatcher of a plan: of rows or slots, to experts here or on other ranks.

        Rows for other ranks are announced: their counts are on the way then.
        """
        # Each rank of tp has a partial sum of every output, and so of the gradient of the weights:
        # this changes nothing in the forward pass, and sums the gradients in the backward pass.
        combine_weight = copy_to_tp_region(plan.combine_weight, self.tp)
        plan = plan._replace(combine_weight=combine_weight)
        num_experts = self.config.num_experts

        # Rows or slots, here or over the ep axis.
        if self.config.dispatch == "ragged" and not is_exporting():
            if not torch.compiler.is_compiling() and is_in_functorch():
                raise ConfigError(
                    "Transforms of torch.func (grad, jvp, vmap, ...) cannot see into the kernels of dispatch 'ragged'. "
                    'Build the sparse layer with dispatch="static".'
                )
            if self.ep is not None:
                return RowExchange(sort_rows(plan, num_experts), self.ep)
            return local_row_dispatcher(plan, num_experts)
        slots = fill_slots(plan, num_experts)
        return SlotDispatcher(slots) if self.ep is None else exchange_slots(slots, self.ep)

    def expert_tokens(self, tokens: Tensor) -> Tensor:
        """Returns tokens <any float>[G, S, D] as the experts take them.

        Returns:
            <dtype of the products>[G * S, D].
        """
        dtype = unwrapped(self.experts).product_dtype()
        return copy_to_tp_region(tokens.flatten(0, 1).to(dtype), self.tp)

    def run_shared(self, tokens: Tensor, is_real: Tensor) -> Tensor | None:
        """Returns the output of the shared experts <dtype of tokens>[T, D]; None without any.

        Args:
            tokens: <dtype of the products>[T, D] as `expert_tokens` returns them; padding may hold NaN.
            is_real: <bool>[G, S] real tokens; others are zeros in the output.
        """
        if self.shared_experts is None:
            return None
        experts, adapters = read_adapters(self.shared_experts, 1, None)
        is_real = is_real.flatten()[:, None]  # [T, 1]
        slots = tokens.where(is_real, 0)[None]  # [1, T, D]
        return experts(Arrived(slots), adapters)[0].where(is_real, 0)

    def _report(self, scores: RouterScores, plan: DispatchPlan) -> RouterOutput:
        # Losses keep their gradient; statistics have none.
        losses = unwrapped(self.router).losses(scores, plan)
        return RouterOutput(
            router_logits=scores.logits,
            plan=plan,
            losses=losses,
            stats=router_stats(scores, plan, losses),
        )


def group_inputs(inputs: RouterInputs, sequences: int) -> RouterInputs:
    """Returns inputs <any>[B, L, ...] by group, [G, S, ...]; the mask as bool.

    Args:
        inputs: Inputs of a layer, None if not given.
        sequences: Sequences in a group.

    Raises:
        DataError: When the mask holds something else than 0 and 1.
    """
    # Everything that belongs to a token is moved with the token.
    grouped: dict[str, Tensor] = {}
    for name, value in inputs._asdict().items():
        if value is not None:
            of_tokens = to_bool_mask(value) if name == "token_mask" else value
            grouped[name] = to_groups(of_tokens, sequences)
    return RouterInputs(**grouped)


def real_tokens(inputs: RouterInputs) -> Tensor:
    """Returns which tokens are real <bool>[G, S]: all of them without a mask."""
    if inputs.token_mask is not None:
        return inputs.token_mask
    tokens = inputs.tokens
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
