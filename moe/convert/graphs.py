"""A model as three graphs, for onnxruntime or torch.export: encoder, decoder, decoder with a cache.

Names of files, inputs and outputs are those of optimum, so programs that run its T5 run these, too.
"""

import copy
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_map
from transformers import DynamicCache, EncoderDecoderCache

from moe.checks import shown
from moe.errors import ConfigError
from moe.kernels.hidden_units import hidden_units
from moe.models.blocks import Block
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.adapters import unwrapped
from moe.sparse.layer import SparseFeedForward, real_tokens
from moe.sparse.router import RouterInputs

OPSET = 20

_MOST_UNROLLED = 16
"""Experts of a layer without a node of its own; each computes all tokens."""

_TOP_1_ROUTERS = ("switch", "token_choice")
"""Routers that, with one choice, weight the likeliest expert by its probability."""

_TOLERANCE = 1e-4
"""Most that logits of onnxruntime may differ from the model's, as a share of their largest value."""


class ExportedLayer(nn.Module):
    """A sparse layer without capacity, of operations that ONNX has.

    Top-1 experts with ReLU are one node, `com.microsoft.MoE`; others compute all tokens, and the
    router's weights select.
    """

    def __init__(self, layer: SparseFeedForward, *, nodes: bool) -> None:
        """Prepares a layer; `nodes` says whether onnxruntime's node may be used.

        Raises:
            ConfigError: When the layer has no graph.
        """
        super().__init__()
        self.layer = layer
        config = layer.config
        self.is_node = (
            nodes
            and config.router in _TOP_1_ROUTERS
            and config.num_selected_experts == 1
            and not config.gated
            and config.activation == "relu"
            and config.expert_bias == "none"
            and not config.product_bias
        )
        if layer.router.experts_choose:
            raise ConfigError(
                f"router {config.router!r} cannot be exported: its experts choose among the tokens of a "
                "whole sequence, which a decoder does not have. Distill a dense student and export that."
            )
        if config.prefix_experts:
            raise ConfigError(
                "A model with experts of a prefix cannot be exported: a graph does not know how a text begins. "
                "Distill a dense student and export that."
            )
        if not self.is_node and config.num_experts > _MOST_UNROLLED:
            raise ConfigError(
                f"A layer with {config.num_experts} experts cannot be exported: every expert would compute all "
                f"tokens, which is done up to {_MOST_UNROLLED} experts. (For ONNX, top-1 experts with ReLU are a node "
                "of onnxruntime, com.microsoft.MoE, without this limit.) Prune experts, or distill a student."
            )

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        *,
        token_ids: Tensor | None = None,
        word_embeddings: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Returns the output <float>[B, L, D] of tokens <float>[B, L, D]; see the layer."""
        inputs = RouterInputs(x, token_mask, token_ids, word_embeddings)
        scores = self.layer.router(inputs)
        shared = self.layer.run_shared(x.flatten(0, 1), real_tokens(inputs))
        y = torch.zeros_like(x) if shared is None else shared.view_as(x)
        experts = unwrapped(self.layer.experts)
        weights = experts.product_weights()
        if self.is_node:
            node = self._node(x, scores.logits, weights.first, weights.down)
            return node if shared is None else y + node, None

        # Weight of each expert for each token, 0 where it was not chosen.  [B, L, E]
        plan = self.layer.router.assign(scores, real_tokens(inputs), drop_tokens=False)
        config = self.layer.config
        choices = F.one_hot(plan.expert_index, config.num_experts)  # [B, L, K, E]
        combine = (choices * plan.combine_weight[..., None]).sum(dim=2).to(x.dtype)

        for index in range(config.num_experts):
            expert: list[Any] = [None if stack is None else stack[index] for stack in weights[:5]]
            first, down, bias, first_bias, down_bias = expert
            product = F.linear(x, first, first_bias)  # [B, L, 2F or F]
            hidden = hidden_units(product, bias, experts.form(), dim=-1)  # [B, L, F]
            y = y + combine[..., index, None] * F.linear(hidden, down, down_bias)
        return y, None

    def _node(self, x: Tensor, logits: Tensor, first: Tensor, down: Tensor) -> Tensor:
        """Returns the output of onnxruntime's node, which contains the softmax of the router."""
        tokens = rearrange(x, "b l d -> (b l) d")
        output = torch.onnx.ops.symbolic(
            "com.microsoft::MoE",
            (tokens, rearrange(logits, "b l e -> (b l) e"), first, None, down, None),
            {"k": 1, "activation_type": "relu", "normalize_routing_weights": 0},
            dtype=x.dtype,
            shape=tokens.shape,
            version=1,
        )
        return output.view_as(x)


# ---------------------------------------------------------------------------
# The three graphs


class Graph(NamedTuple):
    """A module to export.

    Attributes:
        name: Name of its file, without the ending.
        module: Takes the inputs by name, and returns a tuple.
        inputs: Examples, with the names of their dims that vary.
        outputs: Names of the outputs.
    """

    name: str
    module: nn.Module
    inputs: Mapping[str, tuple[Tensor, Mapping[int, str]]]
    outputs: Sequence[str]


class _Encoder(nn.Module):
    def __init__(self, model: STMoEForConditionalGeneration) -> None:
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        return (self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state,)


class _DecoderStep(nn.Module):
    def __init__(self, model: STMoEForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def decode(
        self, mask: Tensor, input_ids: Tensor, memory: Tensor, cache: EncoderDecoderCache
    ) -> Tensor:
        """Returns logits <float>[B, T, V], and extends the cache."""
        output = self.model(
            encoder_outputs=(memory,),
            attention_mask=mask,
            decoder_input_ids=input_ids,
            past_key_values=cache,
            use_cache=True,
            output_router_logits=False,
        )
        return output.logits


class _Decoder(_DecoderStep):
    def forward(
        self, encoder_attention_mask: Tensor, input_ids: Tensor, encoder_hidden_states: Tensor
    ) -> tuple[Tensor, ...]:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        logits = self.decode(encoder_attention_mask, input_ids, encoder_hidden_states, cache)
        return logits, *_keys_and_values(cache, cross=True)


class _DecoderWithPast(_DecoderStep):
    def forward(
        self, encoder_attention_mask: Tensor, input_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        tensors = iter(past)
        for layer in range(len(self.model.model.decoder.blocks)):
            cache.self_attention_cache.update(next(tensors), next(tensors), layer)
            cache.cross_attention_cache.update(next(tensors), next(tensors), layer)
            cache.is_updated[layer] = True

        # Only its shape is read, since its keys are cached.
        batch, length = encoder_attention_mask.shape
        memory = torch.zeros(1, 1, self.model.config.d_model).expand(batch, length, -1)
        logits = self.decode(encoder_attention_mask, input_ids, memory, cache)
        return logits, *_keys_and_values(cache, cross=False)


def _keys_and_values(cache: EncoderDecoderCache, *, cross: bool) -> list[Tensor]:
    """Returns the tensors of a cache in the order of optimum's names."""
    tensors: list[Tensor] = []
    of_self: Any = cache.self_attention_cache.layers
    of_cross: Any = cache.cross_attention_cache.layers
    for own, other in zip(of_self, of_cross, strict=True):
        tensors += [own.keys, own.values]
        if cross:
            tensors += [other.keys, other.values]
    return tensors


def _cache_names(prefix: str, num_layers: int, kinds: Sequence[str]) -> list[str]:
    return [
        f"{prefix}.{layer}.{kind}.{part}"
        for layer in range(num_layers)
        for kind in kinds
        for part in ("key", "value")
    ]


def build_graphs(model: STMoEForConditionalGeneration, *, nodes: bool) -> list[Graph]:
    """Returns the graphs of a copy of a model.

    Args:
        model: On the CPU.
        nodes: Whether experts may be nodes of onnxruntime.

    Raises:
        ConfigError: When a layer cannot be exported.
    """
    model = copy.deepcopy(model).requires_grad_(False)
    model.set_attn_implementation("eager")
    for module in model.modules():  # the graphs have no adapters: PEFT adds them to the weights
        if not getattr(module, "disable_adapters", True):
            module.merge()  # pyright: ignore[reportCallIssue]
    for stack in (model.model.encoder.stack, model.model.decoder):
        for block in stack.blocks:
            assert isinstance(block, Block)
            if block.sparse:
                layer = ExportedLayer(block.sparse_feed_forward, nodes=nodes)
                block.sparse_feed_forward = layer  # pyright: ignore[reportAttributeAccessIssue]

    # Sizes that occur nowhere else, so that none of them is taken for a constant.
    config = model.config
    batch, length, past = 3, 11, 5
    num_layers = len(model.model.decoder.blocks)
    ids = torch.ones(batch, length, dtype=torch.int64)
    source = {0: "batch_size", 1: "encoder_sequence_length"}
    target = {0: "batch_size", 1: "decoder_sequence_length"}
    memory = torch.zeros(batch, length, config.d_model)
    cache: dict[str, tuple[Tensor, Mapping[int, str]]] = {}
    for name in _cache_names("past_key_values", num_layers, ("decoder", "encoder")):
        keys, dim = (past, "past_sequence_length") if ".decoder." in name else (length, source[1])
        shape = (batch, config.num_heads, keys, config.d_kv)
        cache[name] = (torch.zeros(shape), {0: "batch_size", 2: dim})

    first = _cache_names("present", num_layers, ("decoder", "encoder"))
    later = _cache_names("present", num_layers, ("decoder",))
    return [
        Graph(
            "encoder_model",
            _Encoder(model).eval(),
            {"input_ids": (ids, source), "attention_mask": (ids, source)},
            ["last_hidden_state"],
        ),
        Graph(
            "decoder_model",
            _Decoder(model).eval(),
            {
                "encoder_attention_mask": (ids, source),
                "input_ids": (ids[:, :past], target),
                "encoder_hidden_states": (memory, source),
            },
            ["logits", *first],
        ),
        Graph(
            "decoder_with_past_model",
            _DecoderWithPast(model).eval(),
            {
                "encoder_attention_mask": (ids, source),
                "input_ids": (ids[:, :1], {0: "batch_size"}),
                **cache,
            },
            ["logits", *later],
        ),
    ]


def _examples(graph: Graph) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of a graph's module, and the names of their dims that vary.

    The tensors of a cache are one argument, the list `past`. No tensor is given twice: the exporter
    would take two arguments for one.
    """
    examples: dict[str, Any] = {}
    dims: dict[str, Any] = {}
    for name, (tensor, named) in graph.inputs.items():
        example = tensor.clone(memory_format=torch.contiguous_format)
        if name.startswith("past"):
            examples.setdefault("past", []).append(example)
            dims.setdefault("past", []).append(named)
        else:
            examples[name] = example
            dims[name] = named
    return examples, dims


@torch.no_grad()
def export_torch(model: STMoEForConditionalGeneration, folder: Path) -> None:
    """Writes the three graphs of a model for `torch.export.load`.

    Args:
        model: On the CPU. Capacities are ignored: no token is dropped.
        folder: Exists.

    Raises:
        ConfigError: When a layer cannot be exported.
    """
    for graph in build_graphs(model, nodes=False):
        examples, names = _examples(graph)
        dims = tree_map(lambda _: Dim.DYNAMIC, names)
        program = torch.export.export(graph.module, (), examples, dynamic_shapes=dims)
        torch.export.save(program, folder / f"{graph.name}.pt2")


@torch.no_grad()
def export_onnx(model: STMoEForConditionalGeneration, folder: Path) -> float:
    """Writes the three graphs of a model, and compares them with it.

    Args:
        model: On the CPU, in float32, and without a capacity.
        folder: Exists.

    Returns:
        The largest difference of a logit.

    Raises:
        ConfigError: When a layer cannot be exported, the extra is missing, or onnxruntime computes
            something else.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The ONNX export needs onnxscript and onnxruntime: pip install 'stmoe[onnx]'. ({error})"
        ) from error
    # The exporter misses torchvision, and warns of torch's own deprecations and of equal dims.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for graph in build_graphs(model, nodes=True):
            examples, names = _examples(graph)
            torch.onnx.export(
                graph.module,
                (),
                folder / f"{graph.name}.onnx",
                kwargs=examples,
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamic_shapes=names,
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    return _compare(model, folder, onnxruntime)


def _compare(model: STMoEForConditionalGeneration, folder: Path, onnxruntime: Any) -> float:
    """Returns the largest difference of logits, over two steps of a batch with padding."""
    draw = torch.Generator().manual_seed(0)
    vocab = model.config.vocab_size
    ids = torch.randint(2, vocab, (2, 7), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    decoder_ids = torch.randint(2, vocab, (2, 3), generator=draw)
    decoder_ids[:, 0] = model.config.decoder_start_token_id

    def run(file: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        session = onnxruntime.InferenceSession(
            str(folder / file), providers=["CPUExecutionProvider"]
        )
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(None, dict(inputs)), strict=True))

    encoded = run("encoder_model.onnx", {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    common = {"encoder_attention_mask": mask.numpy()}
    first = run(
        "decoder_model.onnx",
        {
            **common,
            "input_ids": decoder_ids[:, :2].numpy(),
            "encoder_hidden_states": encoded["last_hidden_state"],
        },
    )
    past = {
        name.replace("present", "past_key_values"): value
        for name, value in first.items()
        if name != "logits"
    }
    later = run(
        "decoder_with_past_model.onnx", {**common, "input_ids": decoder_ids[:, 2:].numpy(), **past}
    )
    theirs = torch.cat([torch.from_numpy(step["logits"]) for step in (first, later)], dim=1)

    ours = model(
        input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids, decoder_drop_tokens=False
    ).logits
    difference = float((theirs - ours).abs().max())
    if not difference <= _TOLERANCE * float(ours.abs().max()):
        raise ConfigError(
            f"onnxruntime {onnxruntime.__version__} computes other logits than the model: they differ by "
            f"{shown(difference)}. Install onnxruntime 1.28 or later."
        )
    return difference
