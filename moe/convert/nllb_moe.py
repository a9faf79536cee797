"""NLLB-MoE as a host with sparse layers: an M2M100 whose every fourth block is sparse.

Its checkpoints have a configuration and names of their own.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import M2M100Config, NllbMoeConfig

from moe.checkpoint.loading import empty_model
from moe.checks import check
from moe.convert.hf_config import read_hf_config
from moe.convert.weight_map import WeightMapping, renamed_weights

_ONLY_VALUES = {
    "batch_prioritized_routing": False,
    "router_bias": False,
    "router_ignore_padding_tokens": False,
    "second_expert_policy": "all",
    "tie_word_embeddings": True,
}
"""Fields of config.json that hosts do not support otherwise."""

_THEIR_NAMES = {
    r"^model\.": "",
    r"\.encoder_attn": ".cross_attention",
    r"\.final_layer_norm": ".ff_layer_norm",
    r"\.fc([12])\.(weight|bias)$": r".ffn.fc\1.\2",
    r"\.fc1\.sparse\.router\.gate$": ".ffn.router.classifier.weight",
    r"\.fc1\.sparse\.experts\.up_proj$": ".ffn.experts.expert_{expert}.fc1.weight",
    r"\.fc1\.sparse\.experts\.up_proj_bias$": ".ffn.experts.expert_{expert}.fc1.bias",
    r"\.fc1\.sparse\.experts\.down_proj$": ".ffn.experts.expert_{expert}.fc2.weight",
    r"\.fc1\.sparse\.experts\.down_proj_bias$": ".ffn.experts.expert_{expert}.fc2.bias",
}
"""Patterns in a name of the host, and what NLLB-MoE has instead; see `renamed_weights`."""


def from_nllb_moe_config(raw: Mapping[str, Any], names: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the fields of a sparse M2M100's configuration for the config.json of an NLLB-MoE.

    Args:
        raw: Content of the config.json.
        names: Names of the weights, whose experts are counted layer by layer, since layers of a
            pruned model differ; without names each layer has `num_experts`.

    Raises:
        ConfigError: When it has a value of another type, or one that hosts do not support.

    Source:
        NLLB (arXiv:2207.04672) §6; fairseq, branch `nllb`. Differs: outside evaluation the capacity
        is ceil(2 T / E), not 2 ceil(T / E); the balance loss leaves padding out, and has the weight
        of config.json, where the authors have 0.01. transformers, which names the fields, drops out
        single numbers of the experts' outputs in training, and scales the others.
    """
    theirs = read_hf_config(NllbMoeConfig, raw)
    for name, value in _ONLY_VALUES.items():
        given = getattr(theirs, name)
        check(given == value, f"{name} of config.json", given, repr(value))

    # The last of every so many blocks is sparse; layers of a pruned model have fewer experts.
    sparse_layers: dict[str, Any] = {}
    all_experts: set[int] = set()
    biases = [name.removeprefix("model.") for name in names if name.endswith(".fc1.bias")]
    stored = Counter(name.partition(".ffn.experts.")[0] for name in biases)
    for stack in ("encoder", "decoder"):
        step = getattr(theirs, f"{stack}_sparse_step")
        num_blocks = getattr(theirs, f"{stack}_layers")
        blocks = list(range(step - 1, num_blocks, step)) if step > 0 else []
        experts = [stored[f"{stack}.layers.{block}"] or theirs.num_experts for block in blocks]
        sparse_layers |= {f"{stack}_blocks": blocks, f"{stack}_experts": experts}
        all_experts.update(experts)

    # Capacity is a fraction of the tokens; with all of them, none is dropped.
    fraction = theirs.moe_eval_capacity_token_fraction
    eval_capacity_factor = None
    if fraction < 1:
        expected = "1.0, since layers have different numbers of experts"
        check(len(all_experts) == 1, "moe_eval_capacity_token_fraction", fraction, expected)
        eval_capacity_factor = round(fraction * max(all_experts), 9) if fraction > 0 else 2.0
    before = theirs.normalize_router_prob_before_dropping
    sparse_layers["layer"] = {
        "convention": "fairseq",
        "router_options": {
            "normalize_gates": before,
            "normalize_accepted": not before,
            "token_dropout": float(theirs.moe_token_dropout),
        },
        "capacity_factor": 2.0,
        "eval_capacity_factor": eval_capacity_factor,
        "min_expert_capacity": 0,
        "group_size": 1 << 20,  # a whole batch
    }
    sparse_layers |= {
        "num_experts": max(all_experts, default=theirs.num_experts),
        "num_selected_experts": 2,
        "load_balance_loss_weight": theirs.router_aux_loss_coef,
        "router_z_loss_weight": 0.0,  # it was trained without
    }

    # All else has the same names and defaults.
    theirs_alone = NllbMoeConfig.__dataclass_fields__.keys() - vars(M2M100Config())
    fields = {name: value for name, value in raw.items() if name not in theirs_alone}
    return {**fields, "model_type": "sparse_m2m_100", "sparse_layers": sparse_layers}


def nllb_moe_weight_map(config: Any) -> list[WeightMapping]:
    """Returns the weights of a sparse M2M100 with their names in NLLB-MoE.

    The hub's files hold the model without its head, so that names have no prefix `model.`.
    """
    weight_map: list[WeightMapping] = []
    for mapping in renamed_weights(empty_model(config).state_dict(), _THEIR_NAMES):
        prefixed = tuple(f"model.{part}" for part in mapping.parts)
        weight_map += [mapping, mapping._replace(parts=prefixed)]
    return weight_map
