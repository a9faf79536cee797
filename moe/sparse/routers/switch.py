"""Switch: one expert for each token, with ways to explore others."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moe.checks import check_number
from moe.sparse.config import SparseConfig
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.sparse.router import Router
from moe.sparse.router_options import ROUTERS
from moe.sparse.routers.token_choice import select_experts

Policy = Literal["argmax", "input_jitter", "sample"]


@dataclass(frozen=True)
class SwitchOptions:
    """Options of Switch routing; they act in training only, evaluation takes the best expert.

    Attributes:
        policy: `argmax` takes the best expert; `input_jitter` disturbs the router's own copy of
            its input; `sample` draws the expert from the probabilities.
        jitter: Half-width of the factor U(1 - jitter, 1 + jitter) of each number.
        temperature: Temperature of `sample`: above 1 explores more, towards 0 it is the best
            expert; at least 1e-6.
    """

    policy: Policy = "input_jitter"
    jitter: float = 1e-2
    temperature: float = 1.0

    def check(self, config: SparseConfig) -> None:
        """Raises a ConfigError when a value is out of range."""
        check_number("jitter", self.jitter, least=0, below=1)
        check_number("temperature", self.temperature, least=1e-6, reason="'argmax' is its limit")


@ROUTERS.register("switch")
class SwitchRouter(Router):
    """Every token has one expert, weighted by its raw probability.

    Source:
        Switch Transformers (arXiv:2101.03961); Mesh-TensorFlow transformer/moe.py at a32810e,
        `_switch_gating`. ST-MoE (arXiv:2202.08906) §3.2 drops the jitter, which costs quality at
        scale. Differs: evaluation is deterministic under every policy.
    """

    Options: ClassVar[type[SwitchOptions]] = SwitchOptions
    single: ClassVar[bool] = True

    def perturb(self, gate_input: Tensor) -> Tensor:
        """Returns the gate's input, in training with jitter if the policy says so.

        Args:
            gate_input: <float32>[G, S, D or 2D].

        Returns:
            <float32>[G, S, D or 2D].
        """
        if not self.training or self.options.policy != "input_jitter":
            return gate_input

        # Each number of the input is multiplied with a number near 1.
        low = 1 - self.options.jitter
        high = 1 + self.options.jitter
        return gate_input * torch.empty_like(gate_input).uniform_(low, high)

    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for scores <float32>[G, S, E]; see `Router.assign`."""
        # The expert of each token.  [G, S, 1]
        if self.training and self.options.policy == "sample":
            expert_index = sample_expert(scores.logits, self.options.temperature)
        else:
            expert_index = select_experts(scores.probs, 1)

        # The raw probability is the weight, so that the router learns from the task.
        gate = self.gates(scores, expert_index)  # [G, S, 1]

        # Every real token requests its expert; the first C of an expert's tokens get it.
        requested = token_mask[..., None]
        return self.plan_choices(expert_index, gate, requested, token_mask, drop_tokens=drop_tokens)


def sample_expert(logits: Tensor, temperature: float) -> Tensor:
    """Returns an expert of each token, drawn with probabilities softmax(logits / temperature).

    Args:
        logits: <float32>[G, S, E].
        temperature: Above 0.

    Returns:
        <int64>[G, S, 1].
    """
    # The largest of logits + Gumbel noise is such a draw.
    gumbel = -torch.empty_like(logits).exponential_().log()
    noisy_logits = logits.detach() / temperature + gumbel
    return noisy_logits.argmax(dim=-1, keepdim=True)
