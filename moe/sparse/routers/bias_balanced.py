"""Loss-free balancing: a bias of each expert, moved with its load, steers the choice of experts.

The weights of the chosen experts do not depend on the bias.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from moe.checks import check_number
from moe.sparse.config import SparseConfig
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.sparse.router import Router
from moe.sparse.router_options import ROUTERS
from moe.sparse.routers.token_choice import normalize_gates, select_experts
from moe.sparse.stats import RouterStats


@dataclass(frozen=True)
class BiasBalancedOptions:
    """Options of loss-free balancing.

    Attributes:
        update_rate: How far a bias moves in one update, in units of probability. The number of
            steps is stored, so that a new rate also scales the biases of a trained router.
        normalize_gates: Whether the K gates are divided by their sum; a single gate stays raw.
        score: Score s_i of an expert: its `softmax` probability, or the `sigmoid` of its logit, as
            in DeepSeek-V3. Losses and statistics are those of the softmax with both.
    """

    update_rate: float = 1e-3
    normalize_gates: bool = True
    score: Literal["softmax", "sigmoid"] = "softmax"

    def check(self, config: SparseConfig) -> None:
        """Raises a ConfigError when the rate is out of range."""
        reason = "a probability is at most 1; without a bias use 'token_choice'"
        check_number("update_rate", self.update_rate, above=0, most=1, reason=reason)


@ROUTERS.register("bias_balanced")
class BiasBalancedRouter(Router):
    """Every token chooses the K experts of highest score plus bias.

    Its weights are the scores alone. `update` raises the bias of experts with less than the
    mean load and lowers the bias of the others. The training loop calls it once after each step;
    your own loop must do so too. The balance loss stays available; its weight is usually set to 0,
    or small.

    Source:
        Auxiliary-Loss-Free Load Balancing (arXiv:2408.15664), algorithm 1; DeepSeek-V3
        (arXiv:2412.19437) §2.1.2 for `sigmoid`. Differs: the balance loss is that of the softmax.
    """

    Options: ClassVar[type[BiasBalancedOptions]] = BiasBalancedOptions
    load_steps: Tensor  # whole steps of the update rate: exact in any parameter dtype

    def __init__(self, config: SparseConfig) -> None:
        super().__init__(config)
        self.register_buffer("load_steps", torch.zeros(config.num_experts, dtype=torch.int64))

    def reset_parameters(self) -> None:
        """Re-initializes the gate and sets the biases to zero."""
        super().reset_parameters()
        # The base class calls this before the biases exist.
        if hasattr(self, "load_steps"):
            nn.init.zeros_(self.load_steps)

    def load_bias(self) -> Tensor:
        """Returns the bias b_i of each expert <float64>[E], in units of probability."""
        return self.load_steps.double() * self.options.update_rate

    def expert_scores(self, scores: RouterScores) -> Tensor:
        """Returns the score s_i of each expert <float32>[G, S, E]."""
        return scores.logits.sigmoid() if self.options.score == "sigmoid" else scores.probs

    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for scores <float32>[G, S, E]; see `Router.assign`."""
        # The K experts of highest s_i + b_i: the bias decides who is chosen ...
        bias = self.load_bias().to(scores.probs.dtype)  # [E]
        biased = self.expert_scores(scores).detach() + bias  # [G, S, E]
        biased = biased.where(scores.probs >= 0, scores.probs)  # see `choose_again`
        expert_index = select_experts(biased, self.config.num_selected_experts)  # [G, S, K]

        # ... and s_i alone with which weight.
        gates = self.gates(scores, expert_index)  # [G, S, K]

        # Every choice of a real token requests a slot.
        requested = token_mask[..., None].expand_as(expert_index)
        return self.plan_choices(
            expert_index, gates, requested, token_mask, drop_tokens=drop_tokens
        )

    def gates(self, scores: RouterScores, expert_index: Tensor) -> Tensor:
        """Returns the scores <float32>[G, S, K], normalised where the options say so."""
        gates = self.expert_scores(scores).gather(-1, expert_index)
        return normalize_gates(gates) if self.options.normalize_gates else gates

    @torch.no_grad()
    def update(self, stats: RouterStats) -> None:
        """Moves every bias by the update rate against its expert's load.

        Args:
            stats: Statistics of this layer, summed over the micro-batches and ranks of the update.
        """
        # Algorithm 1: e_i = mean load - load of expert i, and b_i moves by u * sign(e_i).
        load = stats.expert_load.double()
        error = load.mean() - load
        self.load_steps.add_(error.sign().long())
