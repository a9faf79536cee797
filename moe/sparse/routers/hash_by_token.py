"""Hash routing: the word decides the expert, nothing is learnt. A baseline."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe.errors import ConfigError, DataError
from moe.sparse.config import SparseConfig
from moe.sparse.inputs import can_look_at
from moe.sparse.plan import DispatchPlan, assign_slots
from moe.sparse.router import ROUTERS, Router, RouterInputs
from moe.sparse.scores import RouterScores, router_scores

_NEVER = -1e4  # exp of it is exactly 0 in float32 and float64, and it stays finite in every loss


@dataclass(frozen=True)
class HashOptions:
    """Options of hash routing.

    Attributes:
        seed: Another seed is another assignment of words to experts; give layers different ones.
    """

    seed: int = 0

    def check(self, config: SparseConfig) -> None:
        """Raises a ConfigError when the gate is asked to see something: there is none."""
        if config.router_input != "hidden":
            raise ConfigError(
                f"router_input is {config.router_input!r}, but router 'hash' has no gate that could see it. Leave "
                "router_input at 'hidden'."
            )


@ROUTERS.register("hash")
class HashRouter(Router):
    """The expert of a token is a fixed random function of its id, its weight is 1; there are no
    parameters.

    Source:
        Hash Layers (arXiv:2106.04426), random hash. Differs: the function is computed, not a table
        of the vocabulary.
    """

    Options: ClassVar[type[HashOptions]] = HashOptions
    single: ClassVar[bool] = True

    @classmethod
    def num_parameters(cls, config: SparseConfig) -> int:
        """Returns 0: there is no gate."""
        return 0

    def forward(self, inputs: RouterInputs) -> RouterScores:
        """Returns scores that leave one expert possible for each token.

        Raises:
            DataError: When there are no token ids, or one of a real token is negative.
        """
        if inputs.token_ids is None:
            raise DataError(
                "Router 'hash' needs the ids of the tokens, but the layer got none. Pass token_ids [B, L] beside the "
                "tokens; a model does so when it is given input_ids, not inputs_embeds."
            )
        _refuse_negative(inputs.token_ids, inputs.token_mask)
        expert = hash_expert(inputs.token_ids, self.config.num_experts, self.options.seed)
        dtype = torch.promote_types(inputs.tokens.dtype, torch.float32)
        shape = (*expert.shape, self.config.num_experts)
        never = torch.full(shape, _NEVER, dtype=dtype, device=expert.device)
        return router_scores(never.scatter(-1, expert[..., None], 0.0))

    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for these scores; see `Router.assign`."""
        capacity = self.capacity(token_mask.shape[1], drop_tokens)
        expert_index = scores.logits.argmax(dim=-1, keepdim=True)
        wanted = token_mask[..., None]
        slot, accepted = assign_slots(expert_index, wanted, self.config.num_experts, capacity)
        return DispatchPlan(
            expert_index,
            slot,
            accepted,
            accepted.to(scores.probs.dtype),
            wanted,
            token_mask,
            capacity,
        )


def _refuse_negative(token_ids: Tensor, token_mask: Tensor | None) -> None:
    """Raises a DataError when the id <any integer>[G, S] of a real token is negative, where that
    can be looked at.
    """
    if not can_look_at(token_ids):
        return

    ids = token_ids if token_mask is None else token_ids[token_mask]
    if ids.numel() and ids.min() < 0:
        raise DataError(
            f"token_ids hold {ids.min().item()}; expected ids of a vocabulary, 0 or more. Give the ids of the tokens, "
            "not labels, and mark padding in token_mask."
        )


def hash_expert(token_ids: Tensor, num_experts: int, seed: int) -> Tensor:
    """Returns the expert <int64>[...] of each token id <int64>[...]: an even, fixed, random-looking
    function.

    Args:
        token_ids: Vocabulary ids.
        num_experts: E.
        seed: Chooses the function.

    Source:
        Multiply and shift as in the finaliser of MurmurHash3, on 31 bits, since torch's integers
        are signed.
    """
    mask = 0x7FFFFFFF
    mixed = (token_ids * 2 + 1 + (seed * 0x9E3779B1 & mask)) & mask
    for factor in (0x45D9F3B, 0x119DE1F3):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & mask
    return (mixed ^ (mixed >> 15)) % num_experts
