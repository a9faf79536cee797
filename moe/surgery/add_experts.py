"""More experts for a sparse model: twins of its experts, or narrow parts of them, with the same outputs.

Each expert becomes m twins of G parts, with m G equal rows of the router. A token uses m G times as
many experts as before: all twins and parts of its experts. Each gets an equal part of the gate, so
the outputs of parts are multiplied by G.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from einops import repeat
from torch import Tensor

from moe.checks import check, check_integer
from moe.convert.formats import rewrite_checkpoint
from moe.convert.weight_map import ConvertedCheckpoint, empty_weights
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import refuse_quantized
from moe.models.weight_files import LazyTensor
from moe.sparse.router_options import ROUTERS, option_names

_PROBABILITIES = ("second_expert_threshold", "eval_second_expert_threshold", "update_rate")
"""Options in units of probability, of which each twin has a part."""

_ROUTERS: Mapping[str, str] = {
    "token_choice": "token_choice",
    "batch_prioritized": "batch_prioritized",
    "bias_balanced": "bias_balanced",
    "switch": "token_choice",
}
"""Router after the addition, by the router before; others cannot choose all twins of an expert."""

_ALL_CHOICES = {
    "normalize_gates": False,
    "second_expert_policy": "all",
    "eval_second_expert_policy": "all",
}
"""Options with which the twins of a single choice have its raw gate."""


@dataclass(frozen=True)
class AddedExperts:
    """Settings of an addition.

    Attributes:
        num_experts: Experts with their twins, m E, a multiple of the model's; None for no twins.
        granularity: Parts that each of them is cut into, G; the layer then has m G E experts.

    Source:
        Virtual groups (arXiv:2410.07524) for G. Expert upcycling (arXiv:2604.19835) for m. Differs:
        K grows with E, which alone keeps the output.
    """

    num_experts: int | None = None
    granularity: int = 1

    def twins(self, sparse: STMoEConfig) -> int:
        """Returns m, the number of twins of each expert.

        Raises:
            ConfigError: When the number of experts is not a multiple of the model's.
        """
        E = sparse.num_experts
        if self.num_experts is None:
            return 1
        check_integer("num_experts", self.num_experts, least=E, reason="the model has as many")
        expected = f"a multiple of {E}, the experts of the model: each gets as many twins"
        check(self.num_experts % E == 0, "num_experts", self.num_experts, expected)
        return self.num_experts // E

    def config(self, sparse: STMoEConfig) -> STMoEConfig:
        """Returns the config of the model with more experts.

        Raises:
            ConfigError: When the model is dense, nothing would be added, or a setting or router does not
                fit the model.
        """
        if not sparse.num_experts:
            raise ConfigError(
                "num_experts of the model is 0; expected a sparse model. Upcycle a dense one: "
                "stmoe upcycle --from MODEL --to SPARSE"
            )
        check_integer("granularity", self.granularity, least=1)
        G = self.granularity
        factor = self.twins(sparse) * G
        width = sparse.expert_d_ff or sparse.d_ff
        if factor == 1:
            raise ConfigError(
                f"The model has {sparse.num_experts} experts already. Give a multiple (--experts "
                f"{2 * sparse.num_experts}) or more parts (--granularity 2)."
            )
        expected = f"a divisor of {width}, the hidden units of an expert"
        check(width % G == 0, "granularity", G, expected)

        prefixes = sparse.prefix_experts or []
        settings: dict[str, Any] = {
            "prefix_experts": [{**e, "num_experts": factor * e["num_experts"]} for e in prefixes]
            or None,
            "num_experts": factor * sparse.num_experts,
            "encoder_experts": [factor * number for number in sparse.layer_experts(decoder=False)],
            "decoder_experts": [factor * number for number in sparse.layer_experts(decoder=True)],
            "num_selected_experts": factor * sparse.num_selected_experts,
            "num_shared_experts": G * sparse.num_shared_experts,
            "expert_d_ff": width // G,
            **scaled_capacity(sparse, factor),  # as many slots for each expert as before
        }
        for decoder, prefix in ((False, ""), (True, "decoder_")):
            if sparse.stack_sizes(decoder)[1]:
                name, options, _ = self._router(sparse, decoder=decoder)
                settings[f"{prefix}router"] = name
                settings[f"{prefix}router_options"] = options
        return sparse.replaced(**settings)

    def changes(self, sparse: STMoEConfig) -> list[str]:
        """Returns what differs from the model before, beyond rounding; for people."""
        changes = []
        for decoder, stack in ((False, "encoder"), (True, "decoder")):
            if sparse.stack_sizes(decoder)[1]:
                *_, stack_changes = self._router(sparse, decoder=decoder)
                changes += [f"In the {stack}, {change}" for change in stack_changes]
        factor = self.twins(sparse) * self.granularity
        if sparse.router_z_loss_weight:
            changes.append(
                f"The router z-loss grows: the logsumexp of {factor} equal rows for each expert is larger by "
                f"log {factor}."
            )
        if sparse.load_balance_loss_weight and sparse.rules.balance_choices == "all":
            changes.append(
                f"The balance loss is {factor} times as large (it counts all choices): divide its weight by {factor}."
            )
        return changes

    def _router(
        self, sparse: STMoEConfig, *, decoder: bool
    ) -> tuple[str, dict[str, Any], list[str]]:
        """Returns the router of a stack, its options, and what they change.

        Raises:
            ConfigError: When it cannot choose all twins of an expert.
        """
        before = sparse.sparse_config(decoder=decoder)
        if before.router not in _ROUTERS:
            raise ConfigError(
                f"The model has router {before.router!r}, which cannot choose all twins or parts of an expert. "
                f"Experts can be added to models with {', '.join(sorted(_ROUTERS))}."
            )
        name = _ROUTERS[before.router]
        known = option_names(ROUTERS.get(name))
        options = dataclasses.asdict(ROUTERS.get(before.router).Options(**before.router_options))
        score = options.get("score", "softmax")
        expected = "softmax: twins share a probability, and sigmoids would add up"
        check(score == "softmax", f"score of router {name!r}", score, expected)

        # A single choice is always taken, with its raw gate.
        K = before.num_selected_experts
        changes = [] if K == 1 else _policy_changes(options, K)
        if K == 1:
            options |= _ALL_CHOICES
        if name != before.router and options.get("policy") != "argmax":
            changes.append(
                f"the exploration of router {before.router!r} in training is lost: the router is now {name!r}."
            )
        factor = self.twins(sparse) * self.granularity
        for option in _PROBABILITIES:
            if option in options:
                options[option] /= factor
        kept = {option: value for option, value in options.items() if option in known}
        return name, kept, changes


def scaled_capacity(config: STMoEConfig, factor: float) -> dict[str, float | None]:
    """Returns the capacity factors of a model, `factor` times as large, by field."""
    scaled: dict[str, float | None] = {}
    for name in ("capacity_factor", "eval_capacity_factor"):
        value = getattr(config, name)
        scaled[name] = None if value is None else value * factor
    return scaled


def _policy_changes(options: Mapping[str, Any], K: int) -> list[str]:
    """Returns why the policy for second experts does not treat all twins of a choice alike."""
    changes = []
    for prefix, mode in (("", "training"), ("eval_", "evaluation")):
        policy = options.get(f"{prefix}second_expert_policy", "all")
        threshold = options.get(f"{prefix}second_expert_threshold", 0.0)
        if policy == "none":
            changes.append(f"one twin of each first choice alone is used in {mode} (policy none).")
        if policy == "random":
            changes.append(
                f"each twin is drawn for itself in {mode} (policy random): outputs are equal on average only."
            )
        # Normalised gates of first choices are at least 1 / K.
        is_safe = options.get("normalize_gates") and threshold * K < 1
        if policy == "threshold" and not is_safe:
            changes.append(
                f"twins of a first choice may be left out in {mode}: its gate can be below the threshold "
                f"{threshold:g}."
            )
    return changes


def add_experts(
    source: Path | str, folder: Path, added: AddedExperts, **download: Any
) -> STMoEConfig:
    """Writes a sparse model with more experts; holds one tensor in memory at a time.

    Args:
        source: A folder of a sparse model, or a name of the hub.
        folder: Exists, and is empty.
        added: The settings.
        download: `revision`, `token`, `cache_dir` and the like.

    Returns:
        The config of the new model.

    Raises:
        ConfigError: When a setting or the router does not fit the model.
        CheckpointError: When a tensor of the source is not accounted for.
    """
    return rewrite_checkpoint(source, folder, partial(with_added_experts, added=added), **download)


def with_added_experts(sparse: ConvertedCheckpoint, added: AddedExperts) -> ConvertedCheckpoint:
    """Returns the weights with twins and parts, each of which is computed when it is read."""
    refuse_quantized(sparse.config, "given twins or cut", sparse.report.source)
    config = added.config(sparse.config)
    m = added.twins(sparse.config)
    G = added.granularity
    halves = 2 if config.gated else 1

    weights: dict[str, LazyTensor] = {}
    for name, tensor in empty_weights(config).items():
        source = sparse.weights[name]
        read = partial(_enlarged, name, source, m, G, halves)
        weights[name] = LazyTensor(tensor.shape, source.dtype, read)
    return sparse._replace(config=config, weights=weights)


def _enlarged(name: str, source: LazyTensor, m: int, G: int, halves: int) -> Tensor:
    """Returns a weight <any>[...] after the addition; the m G parts of an expert are side by side."""
    weight = source.read()
    if ".router." in name:
        return weight.repeat_interleave(m * G, dim=0)
    if ".experts." not in name:
        return weight
    if name.endswith("bias"):
        return repeat(weight, "e (g f) -> (e m g) f", m=m, g=G)
    if name.endswith("down_proj"):
        return repeat(weight, "e d (g f) -> (e m g) d f", m=m, g=G) * G
    return repeat(weight, "e (h g f) d -> (e m g) (h f) d", m=m, g=G, h=halves)
