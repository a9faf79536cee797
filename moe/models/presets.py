"""The published configurations, each with its source; `STMoEConfig.from_preset(name)` reads them."""

from dataclasses import dataclass
from typing import Any

from moe.registry import Registry


@dataclass(frozen=True)
class Preset:
    """Settings that differ from the defaults of STMoEConfig, and where they come from."""

    fields: dict[str, Any]
    source: str


PRESETS: Registry[Preset] = Registry("preset")

_ST_MOE_L_SOURCE = (
    "ST-MoE (arXiv:2202.08906) §4.1, §7 and Table 11. Table 11 prints 27 layers; 24 blocks "
    "with an extra feed-forward layer beside each of the 6 sparse ones are the same 54 "
    "sub-layers, and give the printed 4.1B"
)
_FLAXFORMER = "google/flaxformer@399ea3a8 flaxformer/t5x/configs/moe/models"
_T5_SOURCE = (
    "google-research/text-to-text-transfer-transformer@e081111 released_checkpoints.md, T5 1.1"
)


def _add(name: str, source: str, **fields: Any) -> None:
    PRESETS.add(name, Preset(fields, source))


def _sparse(count: int, experts: int) -> dict[str, int]:
    """Returns fields for `count` sparse layers in each stack with so many experts."""
    return {
        "num_sparse_encoder_layers": count,
        "num_sparse_decoder_layers": count,
        "num_experts": experts,
    }


def _shape(layers: int, d_model: int, d_ff: int, num_heads: int, d_kv: int = 64) -> dict[str, int]:
    """Returns fields for the size of a backbone."""
    return {
        "num_layers": layers,
        "d_model": d_model,
        "d_ff": d_ff,
        "num_heads": num_heads,
        "d_kv": d_kv,
    }


# Dense T5-1.1: GEGLU, untied head.
_add("t5-1.1-small", _T5_SOURCE, **_shape(8, 512, 1024, 6))
_add("t5-1.1-base", _T5_SOURCE, **_shape(12, 768, 2048, 12))
_add("t5-1.1-large", _T5_SOURCE, **_shape(24, 1024, 2816, 16))
_add("t5-1.1-xl", _T5_SOURCE, **_shape(24, 2048, 5120, 32))
_add("t5-1.1-xxl", _T5_SOURCE, **_shape(24, 4096, 10240, 64))

# ST-MoE: top-2, every fourth layer sparse, a dense feed-forward layer after each sparse one.
_ST_MOE = {"sparse_dense_stacking": True}
_add(
    "st-moe-base",
    f"{_FLAXFORMER}/st_moe_base.gin",
    **_shape(12, 768, 2048, 12),
    **_sparse(3, 16),
    **_ST_MOE,
    router_z_loss_weight=1e-4,
)
_add(
    "st-moe-l",
    _ST_MOE_L_SOURCE,
    **_shape(24, 1024, 2816, 16),
    **_sparse(6, 32),
    **_ST_MOE,
    group_size=2048,
)
_add(
    "st-moe-xl",
    f"{_FLAXFORMER}/st_moe_xl.gin",
    **_shape(24, 2048, 5120, 32),
    **_sparse(6, 16),
    **_ST_MOE,
    capacity_factor=2.0,
    eval_capacity_factor=4.0,
    group_size=1024,
    router_z_loss_weight=1e-4,
)
_add(
    "st-moe-32b",
    f"ST-MoE (arXiv:2202.08906) Table 11 and §6.2; {_FLAXFORMER}/st_moe_32b.gin",
    **_shape(24, 5120, 20480, 64, d_kv=128),
    **_sparse(6, 64),
    **_ST_MOE,
)

# Switch: top-1, no router z-loss. Base and large have ReLU and a tied head.
_SWITCH = {"num_selected_experts": 1, "router_z_loss_weight": 0.0}
_SWITCH_CLASSIC = {**_SWITCH, "feed_forward_proj": "relu", "tie_word_embeddings": True}
_SWITCH_SOURCE = "Switch Transformers (arXiv:2101.03961) Table 9 and §5"
for _experts in (8, 16, 32, 64, 128, 256):
    _add(
        f"switch-base-{_experts}",
        f"{_SWITCH_SOURCE}; {_FLAXFORMER}/switch_base.gin",
        **_shape(12, 768, 3072, 12),
        **_sparse(6, _experts),
        **_SWITCH_CLASSIC,
        group_size=8192,
    )
_add(
    "switch-large-128",
    f"{_SWITCH_SOURCE}; {_FLAXFORMER}/switch_large.gin",
    **_shape(24, 1024, 4096, 16),
    **_sparse(12, 128),
    **_SWITCH_CLASSIC,
)
_add(
    "switch-xxl-128",
    f"{_SWITCH_SOURCE} prints 64 experts, which would be 201B; {_FLAXFORMER}/switch_xxl.gin "
    "and the released checkpoint have 128 and the printed 395B",
    **_shape(24, 4096, 10240, 64),
    **_sparse(12, 128),
    **_SWITCH,
    eval_capacity_factor=4.0,
    min_expert_capacity=2,
)
_add(
    "switch-c-2048",
    f"{_SWITCH_SOURCE} prints 32 heads; {_FLAXFORMER}/switch_c.gin has 30; both round to 1571B",
    **_shape(15, 2080, 6144, 30),
    **_sparse(15, 2048),
    **_SWITCH,
    feed_forward_proj="relu",
    capacity_factor=1.0,
    min_expert_capacity=2,
    group_size=2048,
)
