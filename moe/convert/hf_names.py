"""The names of transformers' T5 and Switch for our weights: one table for loading and writing."""

from moe.convert.hf_config import Family
from moe.convert.weight_map import Stack, WeightMapping, stacks_of
from moe.models.configuration import STMoEConfig


def hf_weight_map(config: STMoEConfig, family: Family) -> list[WeightMapping]:
    """Returns our weights with their names in transformers' T5 and Switch.

    Args:
        config: Of our model.
        family: Which of both.

    Source:
        transformers 5.23.0 models/t5, models/switch_transformers.
    """
    weight_map = [WeightMapping("model.encoder.embed_tokens.weight", ("shared.weight",))]
    for stack in stacks_of(config):
        ours = stack.name
        theirs = stack.other_name

        # The first block holds the table that all of them use.
        table = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        weight_map.append(WeightMapping(f"{ours}.position_bias.table", (table,)))
        for number in range(stack.num_blocks):
            weight_map += _block(config, family, stack, number)
        norm = f"{theirs}.final_layer_norm.weight"
        weight_map.append(WeightMapping(f"{ours}.final_norm.weight", (norm,)))

    if not config.tie_word_embeddings:
        weight_map.append(WeightMapping("lm_head.weight", ("lm_head.weight",)))
    return weight_map


def _block(config: STMoEConfig, family: Family, stack: Stack, number: int) -> list[WeightMapping]:
    """Returns the weights of a block: attention, then a dense or a sparse feed-forward layer."""
    ours = f"{stack.name}.blocks.{number}"
    theirs = f"{stack.other_name}.block.{number}.layer"

    # The layers of a block are numbered, and a decoder has one more.
    weight_map = _attention(f"{ours}.self_attention", f"{theirs}.0", "SelfAttention")
    layer = f"{theirs}.1"
    if stack.decoder:
        weight_map += _attention(f"{ours}.cross_attention", f"{theirs}.1", "EncDecAttention")
        layer = f"{theirs}.2"

    # The feed-forward layer comes last; T5 and Switch name its module differently.
    if config.is_sparse_block(number, decoder=stack.decoder):
        return weight_map + _sparse_feed_forward(config, ours, layer)
    module = f"{layer}.DenseReluDense" if family == "t5" else f"{layer}.mlp"
    return weight_map + _feed_forward(config, ours, layer, module)


def _attention(ours: str, layer: str, module: str) -> list[WeightMapping]:
    weight_map = [WeightMapping(f"{ours}_norm.weight", (f"{layer}.layer_norm.weight",))]
    for letter in "qkvo":
        theirs = f"{layer}.{module}.{letter}.weight"
        weight_map.append(WeightMapping(f"{ours}.{letter}_proj.weight", (theirs,)))
    return weight_map


def _feed_forward(config: STMoEConfig, ours: str, layer: str, module: str) -> list[WeightMapping]:
    up = tuple(f"{module}.{name}.weight" for name in up_names(config))
    down = (f"{module}.wo.weight",)
    return [
        WeightMapping(f"{ours}.feed_forward_norm.weight", (f"{layer}.layer_norm.weight",)),
        WeightMapping(f"{ours}.feed_forward.up_proj.weight", up),
        WeightMapping(f"{ours}.feed_forward.down_proj.weight", down),
    ]


def _sparse_feed_forward(config: STMoEConfig, ours: str, layer: str) -> list[WeightMapping]:
    """Returns the weights of a sparse layer, whose experts are stacked here and single there."""
    # Expert by expert, the gate before the rest.
    ups: list[str] = []
    downs: list[str] = []
    for number in range(config.num_experts):
        expert = f"{layer}.mlp.experts.expert_{number}"
        ups += [f"{expert}.{name}.weight" for name in up_names(config)]
        downs.append(f"{expert}.wo.weight")

    E = config.num_experts
    sparse = f"{ours}.sparse_feed_forward"
    gate = f"{layer}.mlp.router.classifier.weight"
    return [
        WeightMapping(f"{ours}.sparse_norm.weight", (f"{layer}.layer_norm.weight",)),
        WeightMapping(f"{sparse}.router.gate", (gate,)),
        WeightMapping(f"{sparse}.experts.{up_proj_name(config)}", tuple(ups), E),
        WeightMapping(f"{sparse}.experts.down_proj", tuple(downs), E),
    ]


def up_names(config: STMoEConfig) -> tuple[str, ...]:
    """Returns the names of the projections into the hidden units, the gate first."""
    return ("wi_0", "wi_1") if config.feed_forward_proj == "gated-gelu" else ("wi",)


def up_proj_name(config: STMoEConfig) -> str:
    """Returns our name of the experts' projection into the hidden units."""
    return "gate_up_proj" if config.feed_forward_proj == "gated-gelu" else "up_proj"
