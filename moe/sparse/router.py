"""The router: tokens to a plan. Comes after groups.py; dispatch.py carries the plan out.

What all routers share stands here; each of them is a file in moe/sparse/routers/, found by ROUTERS.
"""

import dataclasses
import functools
import importlib
import math
import pkgutil
import typing
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

import moe.sparse.routers
from moe.checks import check, check_field_types, is_kind
from moe.errors import ConfigError, DataError, did_you_mean
from moe.registry import Registry
from moe.sparse.capacity import slots_of_expert
from moe.sparse.config import SparseConfig
from moe.sparse.experts import truncated_normal_
from moe.sparse.losses import RouterLosses, router_losses
from moe.sparse.plan import DispatchPlan
from moe.sparse.scores import RouterScores, router_scores
from moe.sparse.stats import RouterStats


class RouterInputs(NamedTuple):
    """What a router may look at.

    Attributes:
        tokens: <any float>[G, S, D] hidden states.
        token_mask: <bool>[G, S] real tokens; None when all are.
        token_ids: <int64>[G, S] vocabulary ids; None when the caller has none.
        word_embeddings: <any float>[G, S, D] embeddings of those ids; None when the caller has
            none.
    """

    tokens: Tensor
    token_mask: Tensor | None = None
    token_ids: Tensor | None = None
    word_embeddings: Tensor | None = None


@dataclass(frozen=True)
class NoOptions:
    """Options of a router that has none."""


class Router(nn.Module):
    """Base of the routers: a float32 gate, and a rule that makes a plan of its scores.

    Everything from the gate's input to the plan is float32 (float64 in a float64 model), whatever
    the autocast or parameter dtype. A router is a subclass with `assign`, registered in ROUTERS.

    Attributes:
        Options: Frozen dataclass of the settings of this router alone; `check(config)` of it is
            optional.
        causal: Whether a token's choice never depends on later tokens; if not, a decoder refuses
            the router. Capacity can cost a token a place after its first through later tokens all
            the same; see `assign_slots`.
        single: Whether a token has one expert, so that `num_selected_experts` must be 1.
    """

    Options: ClassVar[type[Any]] = NoOptions
    causal: ClassVar[bool] = True
    single: ClassVar[bool] = False

    def __init__(self, config: SparseConfig) -> None:
        super().__init__()
        self.config = config
        self.options = self.Options(**config.router_options)
        if self.num_parameters(config):
            self.gate = nn.Parameter(torch.empty(config.num_experts, self.gate_width(config)))
        self.reset_parameters()

    @staticmethod
    def gate_width(config: SparseConfig) -> int:
        """Returns the numbers of a token that the gate sees."""
        return config.d_model * (2 if config.router_input.startswith("concat") else 1)

    @classmethod
    def num_parameters(cls, config: SparseConfig) -> int:
        """Returns the router's number of parameters, before anything is built."""
        return config.num_experts * cls.gate_width(config)

    @classmethod
    def num_choices(cls, config: SparseConfig) -> int:
        """Returns the choices of a token in a plan, K."""
        return config.num_selected_experts

    def reset_parameters(self) -> None:
        """Draws the gate anew: normal, or truncated normal with variance scale / fan_in; see
        SparseConfig.
        """
        if not self.num_parameters(self.config):
            return
        std = self.config.router_initializer_std
        if std is None:
            truncated_normal_(
                self.gate, math.sqrt(self.config.initializer_scale / self.gate.shape[1])
            )
        else:
            nn.init.normal_(self.gate, std=std)

    def forward(self, inputs: RouterInputs) -> RouterScores:
        """Returns the scores of every expert for every token; those of padding are zeros with no
        gradient.

        Raises:
            DataError: When the scores of a real token are not finite, or a needed input is missing.
        """
        dtype = torch.promote_types(inputs.tokens.dtype, torch.float32)
        with torch.autocast(inputs.tokens.device.type, enabled=False):
            seen = self.gate_input(inputs)
            if inputs.token_mask is not None:
                seen = seen.masked_fill(~inputs.token_mask[..., None], 0)
            scores = router_scores(gate_logits(self.perturb(seen.to(dtype)), self.gate.to(dtype)))
        _refuse_not_finite(scores.logits)
        return scores

    def gate_input(self, inputs: RouterInputs) -> Tensor:
        """Returns <any float>[G, S, D or 2D]: what the gate sees of the tokens.

        Source:
            ST-MoE (arXiv:2202.08906) appendix C: neutral after long training; the hidden state
            alone is the default.
        """
        mode, tokens = self.config.router_input, inputs.tokens
        if mode == "hidden":
            return tokens
        if inputs.word_embeddings is None:
            raise DataError(
                f"router_input is {mode!r}, but the layer got no word embeddings. Pass word_embeddings [B, L, D] "
                "beside the tokens, or set router_input to 'hidden'."
            )
        words = (
            inputs.word_embeddings.detach()
            if mode.endswith("stop_gradient")
            else inputs.word_embeddings
        )
        return (
            tokens + words
            if mode.startswith("add")
            else torch.cat([tokens, words.to(tokens.dtype)], dim=-1)
        )

    def perturb(self, seen: Tensor) -> Tensor:
        """Returns the gate's input <float32>[G, S, D or 2D] with the noise that the router adds to
        it.
        """
        return seen

    @abstractmethod
    def assign(
        self, scores: RouterScores, token_mask: Tensor, *, drop_tokens: bool = True
    ) -> DispatchPlan:
        """Returns the plan for these scores.

        Args:
            scores: <float32>[G, S, E] of each kind.
            token_mask: <bool>[G, S] real tokens; padding asks for nothing.
            drop_tokens: False gives every expert room for all tokens, whatever the capacity factor.
        """

    def losses(self, scores: RouterScores, plan: DispatchPlan) -> RouterLosses:
        """Returns the auxiliary losses of a plan."""
        return router_losses(scores, plan, self.config)

    @torch.no_grad()
    def update(self, stats: RouterStats) -> None:
        """Learns from the load of a whole update; called once after the optimizer's step. Most
        routers do not.
        """

    def capacity(self, num_tokens: int, drop_tokens: bool) -> int | None:
        """Returns the slots of an expert in a group of `num_tokens`; None when there is room for
        all.
        """
        if not drop_tokens:
            return None
        return slots_of_expert(self.config, num_tokens, training=self.training)


ROUTERS: Registry[type[Router]] = Registry("router", base=Router)


@functools.cache
def load_routers() -> Registry[type[Router]]:
    """Returns ROUTERS with every file of moe/sparse/routers in it."""
    for module in pkgutil.iter_modules(moe.sparse.routers.__path__):
        importlib.import_module(f"moe.sparse.routers.{module.name}")
    return ROUTERS


def build_router(config: SparseConfig) -> Router:
    """Returns the router that the configuration names, with fresh parameters."""
    return load_routers().get(config.router)(config)


def check_router(config: SparseConfig) -> None:
    """Checks the router, its options and what it demands of the other settings.

    Raises:
        ConfigError: When there is no such router or option, or the layer is not made for it.
    """
    router = load_routers().get(config.router)
    known = [item.name for item in dataclasses.fields(router.Options)]
    for name in config.router_options:
        if name not in known:
            raise ConfigError(
                f"Router {config.router!r} has no option {name!r}.{did_you_mean(name, known)} "
                f"Known: {', '.join(known) or 'none'}."
            )
        kind = typing.get_type_hints(router.Options)[name]
        value = config.router_options[name]
        if kind in _KINDS:
            check(is_kind(value, kind), f"{name} of router {config.router!r}", value, _KINDS[kind])
    options = router.Options(**config.router_options)
    check_field_types(options)
    if hasattr(options, "check"):
        options.check(config)
    if config.decoder:
        check_causal(config.router, "Use it in the encoder only, and here")
    if router.single and config.num_selected_experts != 1:
        raise ConfigError(
            f"Router {config.router!r} gives each token one expert, but num_selected_experts is "
            f"{config.num_selected_experts}. Set num_selected_experts to 1."
        )


def check_causal(name: str, advice: str) -> None:
    """Raises a ConfigError when router `name` is for encoders only; `advice` is what to do with the
    others' names.
    """
    if not load_routers().get(name).causal:
        causal = ", ".join(other for other in ROUTERS.names() if ROUTERS.get(other).causal)
        raise ConfigError(
            f"Router {name!r} cannot be used in a decoder: it decides about a token by looking at later ones, which a "
            f"decoder does not have when it generates. {advice} one of {causal}."
        )


_KINDS = {bool: "True or False", int: "an integer", float: "a finite number"}


def router_options_by_name() -> dict[str, list[str]]:
    """Returns the name of every option that a router has, with the names of the routers that have
    it.
    """
    found: dict[str, list[str]] = {}
    for name in load_routers().names():
        for item in dataclasses.fields(ROUTERS.get(name).Options):
            found.setdefault(item.name, []).append(name)
    return found


def gate_logits(seen: Tensor, gate: Tensor) -> Tensor:
    """Returns the logits <float32>[G, S, E] of what the gate sees.

    Args:
        seen: <float32>[G, S, D or 2D].
        gate: <float32>[E, D or 2D]; stands on the left, since libraries do that product several
            times faster.
    """
    by_expert = gate @ rearrange(seen, "g s d -> d (g s)")
    return rearrange(by_expert.unflatten(1, seen.shape[:2]), "e g s -> g s e").contiguous()


def _refuse_not_finite(logits: Tensor) -> None:
    """Raises a DataError when <float>[G, S, E] holds NaN or infinity; on an accelerator without
    waiting for it.
    """
    message = (
        "The router's logits are not finite: its input or its weights hold NaN or infinity. Look for the first layer "
        "whose output is not finite; lower the learning rate, or use bfloat16 instead of float16."
    )
    if torch.compiler.is_compiling() or not logits.numel():
        return
    least, largest = logits.aminmax()  # one pass over them
    finite = (largest - least).isfinite()
    if logits.device.type != "cpu":
        torch.ops.aten._assert_async.msg(finite, message)
    elif not finite:
        raise DataError(message)
