"""Hash routing: the token's id determines the expert; nothing is learned. A baseline."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe.errors import ConfigError, DataError
from moe.sparse.config import SparseConfig
from moe.sparse.plan import DispatchPlan, RouterScores, router_scores
from moe.sparse.router import Router, RouterInputs
from moe.sparse.router_options import ROUTERS

# A logit whose exp is exactly 0 in float32 and float64, and that stays finite in every loss.
_NEVER = -1e4
_31_BITS = 0x7FFFFFFF


@dataclass(frozen=True)
class HashOptions:
    """Options of hash routing.

    Attributes:
        seed: A different seed gives a different assignment of words to experts; give layers
            different ones.
    """

    seed: int = 0

    def check(self, config: SparseConfig) -> None:
        """Raises a ConfigError if the gate has an input setting: there is no gate."""
        if config.router_input != "hidden":
            raise ConfigError(
                f"router_input is {config.router_input!r}, but router 'hash' has no gate that could read it. Leave "
                "router_input at 'hidden'."
            )


@ROUTERS.register("hash")
class HashRouter(Router):
    """The expert of a token is a fixed random function of its id, and its weight is 1.

    There are no parameters.

    Source:
        Hash Layers (arXiv:2106.04426), random hash. Differs: the function is computed, not a table
        of the vocabulary.
    """

    Options: ClassVar[type[HashOptions]] = HashOptions
    single: ClassVar[bool] = True
    needs_token_ids: ClassVar[bool] = True

    @classmethod
    def num_parameters(cls, config: SparseConfig) -> int:
        """Returns 0: there is no gate."""
        return 0

    def forward(self, inputs: RouterInputs) -> RouterScores:
        """Returns scores that allow one expert for each token.

        Raises:
            DataError: When there are no token ids.
        """
        token_ids = inputs.token_ids
        if token_ids is None:
            raise DataError(
                "Router 'hash' needs the ids of the tokens, but the layer got none. Pass token_ids [B, L] beside the "
                "tokens; a model does so when it is given input_ids, not inputs_embeds."
            )
        num_experts = self.config.num_experts
        expert = hash_expert(token_ids, num_experts, self.options.seed)  # [G, S]

        # Logit 0 for that expert, and probability 0 for all others.
        dtype = torch.promote_types(inputs.tokens.dtype, torch.float32)
        shape = (*expert.shape, num_experts)
        logits = torch.full(shape, _NEVER, dtype=dtype, device=expert.device)
        logits = logits.scatter(-1, expert[..., None], 0.0)  # [G, S, E]
        return router_scores(logits)

    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for scores <float32>[G, S, E]; see `Router.assign`."""
        # The only allowed expert, with a weight of 1.
        expert_index = scores.logits.argmax(dim=-1, keepdim=True)  # [G, S, 1]
        gate = self.gates(scores, expert_index)
        requested = token_mask[..., None]
        return self.plan_choices(expert_index, gate, requested, token_mask, drop_tokens=drop_tokens)

    def gates(self, scores: RouterScores, expert_index: Tensor) -> Tensor:
        """Returns ones <float32>[G, S, K]."""
        return torch.ones_like(expert_index, dtype=scores.logits.dtype)


def hash_expert(token_ids: Tensor, num_experts: int, seed: int) -> Tensor:
    """Returns the expert of each token id: an even, fixed, random-looking function.

    Args:
        token_ids: <any integer>[...] vocabulary ids.
        num_experts: Experts, E.
        seed: Chooses the function.

    Returns:
        <int64>[...].

    Source:
        Multiply and shift as in the finaliser of MurmurHash3, on 31 bits, since torch's integers
        are signed.
    """
    seed_offset = seed * 0x9E3779B1 & _31_BITS
    mixed = (token_ids.long() * 2 + 1 + seed_offset) & _31_BITS

    # Each round carries high bits into low ones, then multiplies.
    for factor in (0x45D9F3B, 0x119DE1F3):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & _31_BITS
    return (mixed ^ (mixed >> 15)) % num_experts
