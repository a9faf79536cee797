"""The sparse layer in another Transformer: an adapter for its feed-forward, and the routers' outputs.

Comes after layer.py.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moe.checks import check, check_choice
from moe.errors import ConfigError, DataError
from moe.sparse.config import SparseConfig
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.recomputation import Recomputation, in_backward


class _NoFastPath:
    """Value of a `weight` that keeps `nn.TransformerEncoder` off its fast path.

    In evaluation torch reads the weights of `linear1` and `linear2` and runs one fused operation on
    them, unless one of them has a `__torch_function__`.
    """

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented


class SparseFeedForwardAdapter(nn.Module):
    """A sparse layer for a Transformer that expects a module from tensor to tensor.

    `collect_routers` returns the routers' outputs. Three things to know:
    - The input is [B, L, D]. A Transformer that keeps its tokens as [L, B, D] (`nn.Transformer...`
      without `batch_first=True`) would route different groups, which can be detected only with a
      token mask.
    - Build a new adapter for each layer, after the Transformer is built: `nn.TransformerEncoder`
      copies its layer, so that all layers would start with the same experts.
    - An adapter cannot know whether its decoder decodes step by step. Set `eval_capacity_factor` to
      None in a decoder that generates, so that no token is dropped, and none depends on its
      neighbours in the batch.

    Example:
        config = SparseConfig(d_model=t5.config.d_model, d_ff=t5.config.d_ff, num_experts=8)
        for block in t5.encoder.block:
            block.layer[-1].DenseReluDense = SparseFeedForwardAdapter(config)

    For `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` use `replace_feed_forward`.
    """

    weight = _NoFastPath()
    bias = _NoFastPath()

    def __init__(self, layer: nn.Module | SparseConfig) -> None:
        super().__init__()
        if isinstance(layer, SparseConfig):
            layer = SparseFeedForward(layer)

        self.sparse = layer

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output.

        Args:
            x: <any float>[B, L, D] tokens.

        Returns:
            <dtype of x>[B, L, D].

        Raises:
            DataError: When the shape does not fit, or the router needs more than hidden states.
        """
        return self.sparse(x)[0]


class _Nothing(nn.Identity):
    """Replaces the second product of a dense feed-forward layer."""

    weight = _NoFastPath()
    bias = _NoFastPath()


def replace_feed_forward(
    layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, config: SparseConfig
) -> SparseFeedForwardAdapter:
    """Puts a sparse layer where a layer of torch's Transformer has its feed-forward layer.

    Everything between the attention and the residual sum is replaced: both products, the activation
    and the dropout on the hidden units, for which `config` has its own settings. torch's fast path,
    which supports only dense products, is not used.

    Example:
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 6)
        for layer in encoder.layers:
            replace_feed_forward(layer, SparseConfig(d_model=512, d_ff=2048, num_experts=8))

    Args:
        layer: Layer with `batch_first=True`, alone or in an encoder or decoder that is complete:
            `nn.TransformerEncoder` copies the layer it is given, experts included.
        config: Settings of the sparse layer; with `decoder=True` where attention is causal.

    Returns:
        The adapter, with new experts on the device and in the dtype of the layer.

    Raises:
        ConfigError: When the layer is not batch first.
    """
    # Otherwise tokens of different sequences would be adjacent.
    attention = layer.self_attn
    check(attention.batch_first, "batch_first of the layer", attention.batch_first, "True")

    # The layer computes linear2(dropout(activation(linear1(x)))).
    adapter = SparseFeedForwardAdapter(config).to(attention.out_proj.weight)
    replacements = {
        "linear1": adapter,
        "activation": nn.Identity(),
        "dropout": nn.Identity(),
        "linear2": _Nothing(),
    }
    for name, module in replacements.items():
        setattr(layer, name, module)
    return adapter


@contextmanager
def collect_routers(
    module: nn.Module, token_mask: Tensor | None = None
) -> Iterator[list[RouterOutput]]:
    """Yields a list that collects the RouterOutput of every sparse layer inside `module`.

    The outputs are in the order of the calls, of which only those of this thread (or context of
    `contextvars`) count. Run the backward pass inside the context.
    Activation checkpointing calls the layers again there: that is not recorded, but needs the same
    token mask. Only without a mask, or without checkpointing, may the backward pass come later.

    Open one context for the encoder and one for the decoder when their masks differ. With nested
    contexts over the same layer, each one records, and the innermost mask applies; a mask passed by
    the model itself overrides all.

    Example:
        with collect_routers(model, token_mask=mask) as routers:
            loss = task_loss(model(x)) + router_loss(routers)
            loss.backward()
        print(RouterStats.sum(router.stats for router in routers).summary())

    Args:
        module: A Transformer, or a part of it.
        token_mask: <bool>[B, L] real tokens, or 0 and 1 of any dtype, of every call inside; None
            means that all are.

    Raises:
        ConfigError: When `module` has no sparse layer, one mask is given to encoder and decoder,
            the layers run under reentrant checkpointing (which loses the gradient of their losses),
            or the context ends before the backward pass of checkpointed layers with a mask.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, SparseFeedForward)]
    _check_layers(module, layers, token_mask)

    # Two hooks on each layer: one gives the mask, the other records what the layer returns.
    collector = _Collector(token_mask)
    with ExitStack() as hooks:
        for layer in layers:
            # Prepended: the innermost context sets its mask first, and the others keep it.
            give_mask = layer.register_forward_pre_hook(
                collector.give_mask, prepend=True, with_kwargs=True
            )
            hooks.enter_context(give_mask)
            hooks.enter_context(layer.register_forward_hook(collector.record))
        outer = _OPEN.set((*_OPEN.get(), collector))
        hooks.callback(_OPEN.reset, outer)
        yield collector.routers
    collector.check_backward()


def _check_layers(
    module: nn.Module, layers: Sequence[SparseFeedForward], token_mask: Tensor | None
) -> None:
    """Raises a ConfigError when there are no sparse layers, or one mask for two kinds of them."""
    if not layers:
        raise ConfigError(
            f"There is no SparseFeedForward in this {type(module).__name__}, so there is nothing to collect. Put a "
            "SparseFeedForwardAdapter(config) in place of its feed-forward layers first, or pass the module that "
            "holds them."
        )

    # Encoder and decoder have separate sequences, and so separate masks.
    num_stacks = len({layer.config.decoder for layer in layers})
    if token_mask is not None and num_stacks > 1:
        raise ConfigError(
            f"This {type(module).__name__} holds sparse layers of an encoder and of a decoder, but there is one "
            "token_mask. Open one context for each: `with collect_routers(model.encoder, encoder_mask) as encoder, "
            "collect_routers(model.decoder, decoder_mask) as decoder`."
        )


def router_loss(
    routers: Sequence[RouterOutput],
    *,
    load_balance_weight: float = 0.01,
    router_z_weight: float = 0.001,
    reduction: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Returns the weighted auxiliary losses of all layers, to be added to the task's loss.

    Args:
        routers: Outputs of one forward pass, from `collect_routers`.
        load_balance_weight: c_B; larger values spread tokens more evenly.
        router_z_weight: c_z; larger values keep the router's logits smaller.
        reduction: Whether layers are summed or averaged.

    Returns:
        <float32>[].

    Raises:
        ConfigError: When there is no such reduction.
        DataError: When there are no routers.

    Source:
        ST-MoE (arXiv:2202.08906) eq. 6 and its weights; Mesh-TensorFlow sums over layers. Differs:
        no.
    """
    check_choice("reduction", reduction, ("sum", "mean"))
    if not routers:
        raise DataError(
            "There are no routers whose losses could be added: no sparse layer has run. Call the model inside "
            "`with collect_routers(model) as routers:`, and only then ask for losses."
        )

    # Eq. 6 without the cross-entropy: c_B L_B + c_z L_z of each layer.
    layer_losses: list[Tensor] = []
    for router in routers:
        balance = load_balance_weight * router.losses.load_balance_loss
        router_z = router_z_weight * router.losses.router_z_loss
        layer_losses.append(balance + router_z)

    total = functools.reduce(torch.add, layer_losses)
    return total / len(layer_losses) if reduction == "mean" else total


class _Collector:
    """The hooks of one context, and the collected outputs.

    Hooks of a layer run in every thread that calls it.
    """

    def __init__(self, token_mask: Tensor | None) -> None:
        self.token_mask = token_mask
        self.routers: list[RouterOutput] = []
        self.wants_gradient = torch.is_grad_enabled()
        self.recomputation = Recomputation()

    def is_for_this_call(self) -> bool:
        """Returns whether a layer is called inside of this context, and by its thread."""
        # A backward pass runs in a thread of torch; a compiler traces one call for all.
        anywhere = torch.compiler.is_compiling() or in_backward()
        return anywhere or any(collector is self for collector in _OPEN.get())

    def give_mask(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns the layer's arguments with the mask, unless the caller gave one."""
        callers_mask = args[1] if len(args) > 1 else kwargs.get("token_mask")
        if self.token_mask is None or callers_mask is not None or not self.is_for_this_call():
            return None

        # A recomputation needs the mask, too: see `check_backward`.
        self.recomputation.watch()
        return args[:1], {**kwargs, "token_mask": self.token_mask}

    def record(
        self, layer: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, RouterOutput]
    ) -> None:
        """Appends the router's output, unless activation checkpointing only calls the layer again."""
        if in_backward() or not self.is_for_this_call():
            return

        # Reentrant checkpointing runs the forward pass without gradient, and records it later.
        if self.wants_gradient and layer.training and not torch.is_grad_enabled():
            raise ConfigError(
                "A sparse layer in training ran without gradient inside a context that was opened with gradient. If "
                "this is activation checkpointing, set use_reentrant=False: the reentrant kind loses the gradient of "
                "the routers' losses. If no gradient is wanted, open torch.no_grad() around collect_routers."
            )
        self.routers.append(output[1])

    def check_backward(self) -> None:
        """Raises a ConfigError when a later backward pass would recompute layers without their mask."""
        if self.recomputation.is_due:
            raise ConfigError(
                "collect_routers ended before the backward pass, but activation checkpointing will call the sparse "
                "layers again there, and then without their token_mask. Call loss.backward() inside the context, or "
                "open torch.no_grad() around it if no gradient is wanted."
            )


_OPEN: ContextVar[tuple[_Collector, ...]] = ContextVar("_OPEN", default=())
"""Contexts that are open in this thread."""
