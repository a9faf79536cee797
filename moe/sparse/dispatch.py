"""Dispatch: from tokens to their experts; combine: from the experts' outputs to tokens.

Comes after plan.py and executes the plan; the experts run between the two halves (experts.py).
`Dispatcher` states both halves once. Here are its forms for experts on this rank; those for experts
on other ranks are in expert_parallel.py:

    FusedDispatcher   on a CPU: gather, experts and combine are one kernel
    ChoiceDispatcher  elsewhere: a row for every choice, so that no host waits for a count
    RowDispatcher     exactly the accepted rows, sorted by expert, where they are counted already
    SlotDispatcher    C slots of every expert for each group, empty or not
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moe.kernels.expert_rows import ChoiceRows, ExpertRows, combine_rows, gather_rows
from moe.kernels.torch_private import is_shape_only
from moe.sparse.plan import DispatchPlan, token_slots

# ---- what travels ----


class SortedRows(NamedTuple):
    """Inputs of the experts: one row for each accepted choice, sorted by expert.

    Attributes:
        x: <float>[N, D] rows; rows after the last expert's are unused.
        ends: <int32>[E] where the rows of each expert end.
    """

    x: Tensor
    ends: Tensor


class UngatheredRows(NamedTuple):
    """Inputs of the fused experts: tokens, and the rows to build from them.

    Attributes:
        tokens: <float>[T, D].
        rows: The token of each row, and its combine weight.
    """

    tokens: Tensor
    rows: ExpertRows


ExpertInputs = SortedRows | UngatheredRows | Tensor
"""Rows, or the slots <float>[E, G * C, D] of every expert."""


class InFlight(Protocol):
    """Inputs of the experts that may still be on their way from other ranks."""

    def wait(self) -> ExpertInputs:
        """Returns the inputs when all have arrived; must be called once."""
        ...


class Arrived(NamedTuple):
    """Inputs of experts on this rank: nothing is in transit."""

    inputs: ExpertInputs

    def wait(self) -> ExpertInputs:
        """Returns the inputs."""
        return self.inputs


# ---- the contract ----


class Dispatcher(ABC):
    """Moves tokens to their experts and the outputs back; built for one plan.

        dispatch   tokens [T, D]  ->  rows [N, D] sorted by expert, or slots [E, G * C, D]
        experts    ->  outputs, a row for each row or a slot for each slot
        combine    outputs        ->  tokens [T, D]

    T = G * S, the tokens of all groups. All forms give the same result. The fused form has
    no rows: its experts take tokens [T, D] and return them combined.
    """

    @abstractmethod
    def dispatch(self, tokens: Tensor) -> InFlight:
        """Sends tokens to their experts, and does not wait for their arrival.

        Args:
            tokens: <float>[T, D].

        Returns:
            The inputs of the experts; `wait` gives them.
        """

    @abstractmethod
    def combine(self, outputs: Tensor) -> Tensor:
        """Returns every token's weighted sum over the outputs of its experts.

        Args:
            outputs: <float> as the experts returned them.

        Returns:
            <float>[T, D]; zeros for a token without an expert.
        """


# ---- rows ----


def sort_rows(plan: DispatchPlan, num_experts: int) -> ExpertRows:
    """Returns the token of each row of each expert; only accepted choices are rows.

    Args:
        plan: Where tokens go.
        num_experts: Experts, E.
    """
    accepted = plan.accepted.flatten(0, 1)  # [T, K]
    num_choices = accepted.shape[1]

    # The accepted choices, in the order of the tokens.
    choice = accepted.flatten().nonzero().squeeze(-1)  # [N], indices into [T * K]
    expert = plan.expert_index.flatten().index_select(0, choice)  # [N]

    # Sort them by expert; within an expert the earlier token comes first.
    order = expert.argsort(stable=True)  # [N]
    choice = choice.index_select(0, order)

    # For the way back: the rows of each token, adjacent, and where they start.
    row = torch.arange(order.numel(), device=order.device)
    by_token = torch.empty_like(order).scatter(0, order, row)  # the inverse of `order`
    rows_of_token = accepted.sum(dim=-1)  # [T]
    return ExpertRows(
        counts=torch.bincount(expert, minlength=num_experts),  # [E]
        token=choice // num_choices,
        weight=plan.combine_weight.flatten().index_select(0, choice),
        by_token=by_token,
        token_start=rows_of_token.cumsum(0) - rows_of_token,
    )


def sort_choices(plan: DispatchPlan, num_experts: int) -> ChoiceRows:
    """Returns a row for every choice; rows of refused choices come after those of all experts.

    No shape depends on the tokens, and the host never waits for the device.

    Args:
        plan: Where tokens go.
        num_experts: Experts, E.
    """
    refused = ~plan.accepted.flatten(0, 1)  # [T, K]

    # Sorted by expert, where refused choices count as one additional expert.
    # A GPU sorts 16 bits in a quarter of the passes of 64.
    expert = plan.expert_index.where(plan.accepted, num_experts).flatten()  # [T * K]
    if num_experts < 2**15:
        expert = expert.to(torch.int16)
    sorted_expert, choice = expert.sort(stable=True)  # [T * K]
    experts = torch.arange(num_experts, dtype=expert.dtype, device=expert.device)
    ends = torch.searchsorted(sorted_expert, experts, right=True, out_int32=True)  # [E]

    # And the way back.
    row = torch.arange(choice.numel(), device=choice.device)
    row_of_choice = torch.empty_like(choice).scatter_(0, choice, row)
    return ChoiceRows(
        ends=ends,
        choice=choice,
        token=choice // refused.shape[1],
        row=row_of_choice.reshape(refused.shape),
        refused=refused,
        weight=plan.combine_weight.flatten(0, 1),
    )


def pad_rows(plan: DispatchPlan, num_experts: int) -> ExpertRows:
    """Returns the rows of `sort_rows`, with rows of refused choices after those of all experts.

    Used by the CPU's kernel in compiled graphs, whose shapes must not depend on tokens.

    Args:
        plan: Where tokens go.
        num_experts: Experts, E.
    """
    rows = sort_choices(plan, num_experts)

    # The rows in the order of their tokens, rows of refused choices again last.
    order = rows.refused.flatten().to(torch.int64).argsort(stable=True)  # accepted choices first
    rows_of_token = plan.accepted.flatten(0, 1).sum(dim=-1)  # [T]
    return ExpertRows(
        counts=rows.ends.diff(prepend=rows.ends.new_zeros(1)).long(),
        token=rows.token,
        weight=rows.weight.flatten().index_select(0, rows.choice),
        by_token=rows.row.flatten().index_select(0, order),
        token_start=rows_of_token.cumsum(0) - rows_of_token,
    )


def local_row_dispatcher(plan: DispatchPlan, num_experts: int) -> Dispatcher:
    """Returns the dispatcher of the rows of a plan for experts on this rank.

    Args:
        plan: Where tokens go.
        num_experts: Experts, E.
    """
    if not has_fused_experts(plan.accepted):
        return ChoiceDispatcher(sort_choices(plan, num_experts))

    # A graph has a fixed number of rows, and the CPU's kernel skips the unused ones.
    is_graph = is_shape_only(plan.accepted)
    rows = pad_rows(plan, num_experts) if is_graph else sort_rows(plan, num_experts)
    return FusedDispatcher(rows)


def row_dispatcher(rows: ExpertRows) -> Dispatcher:
    """Returns the dispatcher of counted rows for experts on this rank: the fused one on a CPU."""
    return FusedDispatcher(rows) if has_fused_experts(rows.token) else RowDispatcher(rows)


def has_fused_experts(x: Tensor) -> bool:
    """Returns whether experts have one kernel where <any>[...] is: the place where devices differ."""
    return x.device.type == "cpu"


class RowDispatcher(Dispatcher):
    """Copies of the tokens, sorted by expert; outputs are added to their tokens."""

    def __init__(self, rows: ExpertRows) -> None:
        self._rows = rows

    def dispatch(self, tokens: Tensor) -> InFlight:
        """Returns a row for each choice of the tokens <float>[T, D]."""
        x = tokens.index_select(0, self._rows.token)  # [N, D]
        return Arrived(SortedRows(x, self._rows.ends()))

    def combine(self, outputs: Tensor) -> Tensor:
        """Returns the tokens <float>[T, D] of the rows <float>[N, D]."""
        weight = self._rows.weight[:, None].to(outputs.dtype)  # [N, 1]
        num_tokens = self._rows.token_start.numel()
        combined = outputs.new_zeros(num_tokens, outputs.shape[1])  # [T, D]
        return combined.index_add(0, self._rows.token, outputs * weight)


class ChoiceDispatcher(Dispatcher):
    """A row for every choice of every token, of which those of refused choices are unused.

    Grouped products leave these rows uninitialized, in outputs and in gradients: gather and combine
    read them as zeros. The host never waits, and a CUDA graph can capture all of it.
    """

    def __init__(self, rows: ChoiceRows) -> None:
        self._rows = rows

    def dispatch(self, tokens: Tensor) -> InFlight:
        """Returns a row for each choice of the tokens <float>[T, D]."""
        x = gather_rows(tokens, self._rows)  # [T * K, D]
        return Arrived(SortedRows(x, self._rows.ends))

    def combine(self, outputs: Tensor) -> Tensor:
        """Returns the tokens <float>[T, D] of the rows <float>[T * K, D]."""
        return combine_rows(outputs, self._rows)


class FusedDispatcher(Dispatcher):
    """Leaves copies and sums to the experts' kernel, which does them while rows are in the cache.

    The outputs of the experts are therefore combined already, and have the shape of the tokens.
    """

    def __init__(self, rows: ExpertRows) -> None:
        self._rows = rows

    def dispatch(self, tokens: Tensor) -> InFlight:
        """Returns the tokens <float>[T, D] with the rows to build from them."""
        return Arrived(UngatheredRows(tokens, self._rows))

    def combine(self, outputs: Tensor) -> Tensor:
        """Returns the outputs <float>[T, D] as they are."""
        return outputs


# ---- slots ----


class Slots(NamedTuple):
    """A plan as fixed slots: every expert has C of them for each group, empty or not.

    Attributes:
        token: <int64>[E, G * C] token in each slot, an index into [T, D]; T (none) for an empty
            slot.
        weight: <float32>[E, G * C] combine weight; 0 for an empty slot.
        num_tokens: T.
    """

    token: Tensor
    weight: Tensor
    num_tokens: int


def fill_slots(plan: DispatchPlan, num_experts: int) -> Slots:
    """Returns the token in each slot.

    No shape depends on the tokens, and the device is never waited for.

    Args:
        plan: Where tokens go; without a capacity every expert has a slot for every token, in the
            order of the tokens.
        num_experts: Experts, E.
    """
    num_groups, group_size, num_choices = plan.expert_index.shape
    device = plan.slot.device
    if plan.capacity is None:
        capacity = group_size
        slot_of_expert = token_slots(plan.expert_index)  # [G, S, K]
    else:
        capacity = plan.capacity
        slot_of_expert = plan.slot  # [G, S, K]
    num_slots = num_experts * num_groups * capacity
    num_tokens = num_groups * group_size

    # The slot of each choice, counted over all experts and groups; refused choices share one
    # additional slot.
    group = torch.arange(num_groups, device=device)[:, None, None]  # [G, 1, 1]
    slot = (plan.expert_index * num_groups + group) * capacity + slot_of_expert  # [G, S, K]
    slot = slot.masked_fill(~plan.accepted, num_slots).flatten()  # [T * K]

    # Write the token of each choice into its slot, and its weight. Two choices of one token for the
    # same expert share the token's slot, where there is no capacity, and so add up.
    token = torch.arange(num_tokens, device=device)
    token_of_choice = token[:, None].expand(-1, num_choices).flatten()  # [T * K]
    weight_of_choice = plan.combine_weight.flatten()  # [T * K]
    slot_token = token.new_full((num_slots + 1,), num_tokens)
    slot_token = slot_token.scatter(0, slot, token_of_choice)  # in place vmap could not
    slot_weight = weight_of_choice.new_zeros(num_slots + 1)
    slot_weight = slot_weight.scatter_add(0, slot, weight_of_choice)

    return Slots(
        token=rearrange(slot_token[:num_slots], "(e n) -> e n", e=num_experts),
        weight=rearrange(slot_weight[:num_slots], "(e n) -> e n", e=num_experts),
        num_tokens=num_tokens,
    )


class SlotDispatcher(Dispatcher):
    """Tokens in the slots of their experts; outputs are added to their tokens.

    An empty slot holds zeros, not some token's row: 0 times a row that is not finite, or overflows
    there, is NaN.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def dispatch(self, tokens: Tensor) -> InFlight:
        """Returns the slots of the experts for tokens <float>[T, D]."""
        return Arrived(self.fill(tokens))

    def fill(self, tokens: Tensor) -> Tensor:
        """Returns the slots <float>[E, G * C, D] for tokens <float>[T, D]."""
        # A row of zeros follows the last token, for empty slots.
        padded = F.pad(tokens, (0, 0, 0, 1))  # [T + 1, D]
        rows = padded.index_select(0, self._slots.token.flatten())
        return rearrange(rows, "(e n) d -> e n d", e=self._slots.token.shape[0])

    def combine(self, outputs: Tensor) -> Tensor:
        """Combines the slots <float>[E, G * C, D] into the tokens <float>[T, D]."""
        num_tokens = self._slots.num_tokens
        weight = self._slots.weight[..., None].to(outputs.dtype)  # [E, G * C, 1]
        rows = rearrange(outputs * weight, "e n d -> (e n) d")

        # Empty slots are added to a row after the last token.
        combined = rows.new_zeros(num_tokens + 1, rows.shape[-1])
        combined = combined.index_add(0, self._slots.token.flatten(), rows)
        return combined[:num_tokens]  # [T, D]
