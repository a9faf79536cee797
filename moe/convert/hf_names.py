"""The names of T5, Switch and T5X for our weights: one table for loading, converting and exporting."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe.convert.hf_config import Family
from moe.models.configuration import STMoEConfig


class Weight(NamedTuple):
    """One of our weights and the tensors of another library that it is made of.

    Attributes:
        name: Ours, in STMoEForConditionalGeneration.
        parts: Theirs, expert by expert, of each expert the gate before the rest.
        num_experts: Experts that are stacked along a new first dimension; 0 for none.
        transposed: Whether their last two dimensions are the other way round.
    """

    name: str
    parts: tuple[str, ...]
    num_experts: int = 0
    transposed: bool = False

    def join(self, parts: Iterable[Tensor], shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Returns our tensor <dtype>[...] of `shape`, in memory of its own, made of their parts one
        at a time.
        """
        joined = torch.empty(tuple(shape), dtype=dtype)
        for part, target in zip(parts, self.pieces(joined), strict=True):
            target.copy_(part)
        return joined

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Returns their parts by name as views of our tensor <any>[...]."""
        return dict(zip(self.parts, self.pieces(tensor), strict=True))

    def pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yields the views of our tensor <any>[...] that are their parts <any>[...], in the order
        of `parts`.
        """
        for expert in tensor.unbind(0) if self.num_experts else [tensor]:
            rows = len(self.parts) // max(self.num_experts, 1)
            for piece in expert.chunk(rows, dim=-2) if rows > 1 else [expert]:
                yield piece.transpose(-1, -2) if self.transposed else piece


def transformers_names(config: STMoEConfig, family: Family) -> list[Weight]:
    """Returns our weights with their names in transformers' T5 and Switch.

    Source:
        transformers 5.23.0 models/t5, models/switch_transformers.
    """
    gated = config.feed_forward_proj == "gated-gelu"
    ups = ("wi_0", "wi_1") if gated else ("wi",)
    dense = "DenseReluDense" if family == "t5" else "mlp"
    weights = [Weight("model.encoder.embed_tokens.weight", ("shared.weight",))]
    for ours, theirs, number, decoder in _stacks(config):
        table = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        weights.append(Weight(f"{ours}.position_bias.table", (table,)))
        for i in range(number):
            block, layers = f"{ours}.blocks.{i}", f"{theirs}.block.{i}.layer"
            attentions = [("self", f"{layers}.0", "SelfAttention")]
            attentions += [("cross", f"{layers}.1", "EncDecAttention")] if decoder else []
            for kind, layer, module in attentions:
                weights.append(
                    Weight(f"{block}.{kind}_attention_norm.weight", (f"{layer}.layer_norm.weight",))
                )
                for x in "qkvo":
                    name = f"{layer}.{module}.{x}.weight"
                    weights.append(Weight(f"{block}.{kind}_attention.{x}_proj.weight", (name,)))
            layer = f"{layers}.{len(attentions)}"
            if not config.is_sparse_block(i, decoder=decoder):
                weights.append(
                    Weight(f"{block}.feed_forward_norm.weight", (f"{layer}.layer_norm.weight",))
                )
                up = tuple(f"{layer}.{dense}.{wi}.weight" for wi in ups)
                weights.append(Weight(f"{block}.feed_forward.up_proj.weight", up))
                weights.append(
                    Weight(
                        f"{block}.feed_forward.down_proj.weight", (f"{layer}.{dense}.wo.weight",)
                    )
                )
                continue
            sparse, E = f"{block}.sparse_feed_forward", config.num_experts
            experts = [f"{layer}.mlp.experts.expert_{e}" for e in range(E)]
            up = tuple(f"{expert}.{wi}.weight" for expert in experts for wi in ups)
            down = tuple(f"{expert}.wo.weight" for expert in experts)
            weights += [
                Weight(f"{block}.sparse_norm.weight", (f"{layer}.layer_norm.weight",)),
                Weight(f"{sparse}.router.gate", (f"{layer}.mlp.router.classifier.weight",)),
                Weight(f"{sparse}.experts.{'gate_up' if gated else 'up'}_proj", up, E),
                Weight(f"{sparse}.experts.down_proj", down, E),
            ]
        weights.append(Weight(f"{ours}.final_norm.weight", (f"{theirs}.final_layer_norm.weight",)))
    if not config.tie_word_embeddings:
        weights.append(Weight("lm_head.weight", ("lm_head.weight",)))
    return weights


def t5x_names(config: STMoEConfig) -> list[Weight]:
    """Returns our weights with their names in a checkpoint of T5X, below its `target`.

    Source:
        google/flaxformer at 399ea3a8, t5x/architectures/moe; google-research/t5x, unscanned
        checkpoints.
    """
    gated = config.feed_forward_proj == "gated-gelu"
    ups = ("wi_0", "wi_1") if gated else ("wi",)
    weights = [Weight("model.encoder.embed_tokens.weight", ("token_embedder/embedding",))]

    def kernels(name: str, theirs: Iterable[str], num_experts: int = 0) -> None:
        """Adds a weight that is made of kernels."""
        weights.append(
            Weight(name, tuple(f"{part}/kernel" for part in theirs), num_experts, transposed=True)
        )

    for ours, theirs, number, decoder in _stacks(config):
        table = (f"{theirs}/relpos_bias/rel_embedding",)
        weights.append(Weight(f"{ours}.position_bias.table", table, transposed=True))
        attentions = [("self", "attention", "attention")]
        if decoder:
            cross = ("cross", "encoder_decoder_attention", "cross_attention")
            attentions = [("self", "self_attention", "self_attention"), cross]
        for i in range(number):
            block, layer = f"{ours}.blocks.{i}", f"{theirs}/layers_{i}"
            for kind, module, norm in attentions:
                norm = (f"{layer}/pre_{norm}_layer_norm/scale",)
                weights.append(Weight(f"{block}.{kind}_attention_norm.weight", norm))
                for x, part in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
                    kernels(
                        f"{block}.{kind}_attention.{x}_proj.weight", [f"{layer}/{module}/{part}"]
                    )
            sparse = config.is_sparse_block(i, decoder=decoder)
            norm = (f"{layer}/pre_mlp_layer_norm/scale",)
            weights.append(
                Weight(f"{block}.{'sparse' if sparse else 'feed_forward'}_norm.weight", norm)
            )
            dense = None if sparse else "mlp"
            if sparse:
                experts = f"{block}.sparse_feed_forward.experts"
                gate = f"{block}.sparse_feed_forward.router.gate"
                kernels(gate, [f"{layer}/mlp/router/router_weights/w"])
                kernels(
                    f"{experts}.{'gate_up' if gated else 'up'}_proj",
                    [f"{layer}/mlp/expert/{wi}" for wi in ups],
                )
                kernels(f"{experts}.down_proj", [f"{layer}/mlp/expert/wo"])
                if config.sparse_dense_stacking:
                    dense = "extra_mlp"
                    norm = (f"{layer}/pre_extra_mlp_layer_norm/scale",)
                    weights.append(Weight(f"{block}.feed_forward_norm.weight", norm))
            if dense is not None:
                kernels(
                    f"{block}.feed_forward.up_proj.weight", [f"{layer}/{dense}/{wi}" for wi in ups]
                )
                kernels(f"{block}.feed_forward.down_proj.weight", [f"{layer}/{dense}/wo"])
        weights.append(Weight(f"{ours}.final_norm.weight", (f"{theirs}/{theirs}_norm/scale",)))
    if not config.tie_word_embeddings:
        kernels("lm_head.weight", ["decoder/logits_dense"])
    return weights


def _stacks(config: STMoEConfig) -> list[tuple[str, str, int, bool]]:
    """Returns our name, theirs, the number of blocks and whether it decodes, of each stack."""
    encoder, decoder = (config.stack_sizes(decoder)[0] for decoder in (False, True))
    return [
        ("model.encoder.stack", "encoder", encoder, False),
        ("model.decoder", "decoder", decoder, True),
    ]
