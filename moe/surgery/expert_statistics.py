"""Statistics of every expert on calibration batches: how often it is chosen, how strongly, what it outputs.

Comes before `prune`, which scores experts by them. All of them are sums over tokens, so that they
add up exactly over batches and ranks.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.data.pipeline import Batch
from moe.distributed.collectives import reduce_from_tp_region, sum_each_over_ranks
from moe.errors import DataError
from moe.models.inputs import IGNORED_LABEL
from moe.sparse.adapters import unwrapped
from moe.sparse.editing import LayerKey, edit_routing, sparse_layers
from moe.sparse.groups import to_groups
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.sparse.router import Router
from moe.tracing.recorder import evaluation_mode, unpacked
from moe.tracing.trace import layer_name


class ExpertStatistics(NamedTuple):
    """Sums over the tokens of one sparse layer, without padding.

    Attributes:
        num_tokens: <int64>[] tokens, whether they have an expert or not.
        load: <int64>[E] tokens that an expert received.
        first_load: <int64>[E] tokens of which it is the first choice: the one of largest gate.
        gate_sum: <float64>[E] sum of its gates.
        first_gate_sum: <float64>[E] sum of its gates where it is the first choice.
        gated_norm_sum: <float64>[E] sum of gate times the L2 norm of its output, before the gate.
    """

    num_tokens: Tensor
    load: Tensor
    first_load: Tensor
    gate_sum: Tensor
    first_gate_sum: Tensor
    gated_norm_sum: Tensor


def expert_statistics(
    model: Any, batches: Iterable[Batch], *, group: ProcessGroup | None = None
) -> dict[LayerKey, ExpertStatistics]:
    """Returns the statistics of every sparse layer, in evaluation mode and without dropping tokens.

    The decoder reads the labels. For statistics of generation give batches of `generated_batches`,
    whose labels are the model's own answers, in addition or instead.

    Args:
        model: Ours or a host with sparse layers; its training mode is restored.
        batches: Keyword arguments of its forward, with labels; not packed. With several ranks each
            has its own; ranks that share experts need equally many.
        group: Ranks whose sums are added up; None for all.

    Raises:
        DataError: When no batch holds a token, or one is packed.
    """
    layers = sparse_layers(model)
    sums = {key: _no_tokens(layer) for key, layer in layers.items()}

    def add(key: LayerKey, layer: Any, args: Any, output: Any) -> None:
        x = args[0]  # [B, L, D]
        router_output: RouterOutput = output[1]
        sequences = router_output.plan.token_mask.shape[1] // x.shape[1]
        of_batch = layer_statistics(layer, to_groups(x, sequences), router_output)
        sums[key] = ExpertStatistics(*map(torch.add, sums[key], of_batch))

    edits = {key: partial(_dropless, unwrapped(layer.router)) for key, layer in layers.items()}
    with ExitStack() as stack, torch.no_grad():
        for key, layer in layers.items():
            stack.enter_context(layer.register_forward_hook(partial(add, key)))
        stack.enter_context(edit_routing(model, edits))
        stack.enter_context(evaluation_mode(model))
        for batch in batches:
            inputs = without_labels(model, unpacked(batch))
            model(**inputs, use_cache=False, output_router_logits=True)
    for key, statistics in sums.items():
        sums[key] = ExpertStatistics(*sum_each_over_ranks(statistics, group))
        if not sums[key].num_tokens:
            raise DataError(
                f"The calibration batches hold 0 tokens for {layer_name(key)}; expected at least 1. "
                "Give more text."
            )
    return sums


def without_labels(model: Any, batch: Batch) -> Batch:
    """Returns inputs that route the same tokens, but have no loss."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    inputs["decoder_attention_mask"] = labels != IGNORED_LABEL
    return inputs


def _dropless(router: Router, scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
    """Returns the plan without capacity, unless experts choose: there capacity is how they choose."""
    if router.experts_choose:
        return plan
    return router.assign(scores, plan.token_mask, drop_tokens=False)


def layer_statistics(
    layer: SparseFeedForward, tokens: Tensor, router_output: RouterOutput
) -> ExpertStatistics:
    """Returns the statistics of one layer for the tokens <any float>[G, S, D] of one batch."""
    E = layer.config.num_experts
    plan = router_output.plan
    accepted = plan.accepted  # [G, S, K]
    expert = plan.expert_index[accepted]  # [N], for each accepted choice

    # Outside training, weights are gates times the share of tokens that token dropout leaves.
    left = 1 - layer.config.router_options.get("token_dropout", 0.0)
    gates = plan.combine_weight.double() / left  # [G, S, K]
    gate = gates[accepted]  # [N]

    # The unweighted output of each accepted choice.
    outputs = [choice_output(layer, tokens, plan, k) for k in range(accepted.shape[2])]
    output = torch.stack(outputs, dim=2)[accepted].double()  # [N, D]
    gated_norm = gate * output.norm(dim=-1)

    # The first choice of a token is the accepted one of largest gate.
    best = plan.combine_weight.masked_fill(~accepted, -1).argmax(dim=-1, keepdim=True)
    is_first = torch.zeros_like(accepted).scatter(-1, best, True) & accepted
    first_expert = plan.expert_index[is_first]  # [tokens with an expert]
    first_gate = gates[is_first]

    zeros = gate.new_zeros(E)
    return ExpertStatistics(
        num_tokens=plan.token_mask.sum(),
        load=torch.bincount(expert, minlength=E),
        first_load=torch.bincount(first_expert, minlength=E),
        gate_sum=zeros.index_add(0, expert, gate),
        first_gate_sum=zeros.index_add(0, first_expert, first_gate),
        gated_norm_sum=zeros.index_add(0, expert, gated_norm),
    )


def choice_output(
    layer: SparseFeedForward, tokens: Tensor, plan: DispatchPlan, choice: int
) -> Tensor:
    """Returns what the experts of one choice output for their tokens, without the gate.

    The rows take the way of the layer's own forward, so that experts on other ranks, quantised ones
    and those with adapters are read as they are used.

    Args:
        layer: The layer.
        tokens: <any float>[G, S, D].
        plan: Experts <int64>[G, S, K] of every token.
        choice: Which of the K.

    Returns:
        <dtype of the products>[G, S, D]; zeros where the choice is not accepted.
    """
    is_choice = torch.zeros_like(plan.accepted)
    is_choice[..., choice] = True
    accepted = plan.accepted & is_choice
    ones = accepted.to(plan.combine_weight.dtype)
    dispatcher = layer.start_dispatcher(plan._replace(accepted=accepted, combine_weight=ones))
    in_flight = dispatcher.dispatch(layer.expert_tokens(tokens))
    combined = dispatcher.combine(layer.experts(in_flight))  # [G * S, D]
    return reduce_from_tp_region(combined, layer.tp).unflatten(0, tokens.shape[:2])


def _no_tokens(layer: SparseFeedForward) -> ExpertStatistics:
    """Returns the sums over no tokens."""
    E = layer.config.num_experts
    device = unwrapped(layer.experts).down_proj.device
    counts = torch.zeros(E, dtype=torch.int64, device=device)
    sums = torch.zeros(E, dtype=torch.float64, device=device)
    return ExpertStatistics(counts.sum(), counts, counts, sums, sums, sums)
