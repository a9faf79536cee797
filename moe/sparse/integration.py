"""The sparse layer in a foreign Transformer: its place there, and what its routers did. Comes after
layer.py.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils.module_tracker import ModuleTracker

from moe.checks import check, check_choice, check_number
from moe.errors import ConfigError, DataError
from moe.sparse.config import SparseConfig
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.stats import RouterStats, add_stats


class FeedForwardSlot(nn.Module):
    """A sparse layer where a Transformer expects a module from tensor to tensor; `collect_routers`
    gives the rest.

    Three things to know:
    - The input is [B, L, D]. A Transformer that keeps its tokens as [L, B, D] (`nn.Transformer...`
      without `batch_first=True`) would route other groups, and nothing can notice unless there is a
      token mask.
    - Make a new slot for each layer, after the Transformer is built: `nn.TransformerEncoder` copies
      its layer, so that all layers would start with the same experts.
    - A slot cannot know whether its decoder decodes step by step. Set `eval_capacity_factor` to
      None in a decoder that generates, so that no token is dropped, and none depends on its
      neighbours in the batch.

    Example:
        config = SparseConfig(d_model=t5.config.d_model, d_ff=t5.config.d_ff, num_experts=8)
        for block in t5.encoder.block:
            block.layer[-1].DenseReluDense = FeedForwardSlot(config)
    """

    def __init__(self, layer: nn.Module | SparseConfig) -> None:
        super().__init__()
        if isinstance(layer, SparseConfig):
            layer = SparseFeedForward(layer)

        # Adapters, compilation and activation checkpointing wrap a layer into a module of their
        # own.
        parts = layer.modules() if isinstance(layer, nn.Module) else ()
        num_sparse = sum(isinstance(part, SparseFeedForward) for part in parts)
        expected = "a SparseFeedForward, be it wrapped, or the SparseConfig of one"
        check(num_sparse == 1, "layer of a FeedForwardSlot", layer, expected)
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


@contextmanager
def collect_routers(
    module: nn.Module, token_mask: Tensor | None = None
) -> Iterator[list[RouterOutput]]:
    """Gives a list that fills with the RouterOutput of every sparse layer inside `module`, in the
    order of the calls.

    Run the backward pass inside the context. Activation checkpointing calls the layers again there:
    that is not recorded, but needs the same token mask. Only without a mask, or without
    checkpointing, may backward come later.

    Open one context for the encoder and one for the decoder when their masks differ. Of nested
    contexts over the same layer each records, and the innermost mask holds; a mask that the model
    passes itself comes before all.

    Example:
        with collect_routers(model, token_mask=mask) as routers:
            loss = task_loss(model(x)) + router_loss(routers)
            loss.backward()
        print(summarize(total_stats(routers)))

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
    if not layers:
        raise ConfigError(
            f"There is no SparseFeedForward in this {type(module).__name__}, so there is nothing to collect. Put "
            "FeedForwardSlot(config) into its feed-forward slots first, or pass the module that holds them."
        )
    if token_mask is not None and len({layer.config.decoder for layer in layers}) > 1:
        raise ConfigError(
            f"This {type(module).__name__} holds sparse layers of an encoder and of a decoder, but there is one "
            "token_mask. Open one context for each: `with collect_routers(model.encoder, encoder_mask) as encoder, "
            "collect_routers(model.decoder, decoder_mask) as decoder`."
        )
    collector = _Collector(token_mask)
    with ExitStack() as hooks:
        for layer in layers:  # the innermost context comes first, and the others respect its mask
            hooks.enter_context(
                layer.register_forward_pre_hook(collector.give_mask, prepend=True, with_kwargs=True)
            )
            hooks.enter_context(layer.register_forward_hook(collector.record))
        yield collector.routers
    collector.check_backward()


def router_loss(
    routers: Sequence[RouterOutput],
    *,
    load_balance_weight: float = 0.01,
    router_z_weight: float = 0.001,
    reduction: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Returns <float32>[]: the weighted auxiliary losses of all layers, to be added to the task's
    loss.

    Args:
        routers: Of one forward pass, from `collect_routers`.
        load_balance_weight: c_B; larger values spread tokens more evenly.
        router_z_weight: c_z; larger values keep the router's logits smaller.
        reduction: Whether layers are summed or averaged.

    Raises:
        ConfigError: When there is no such reduction, or a weight is no finite number of at least 0.
        DataError: When there are no routers.

    Source:
        ST-MoE (arXiv:2202.08906) eq. 6 and its weights; Mesh-TensorFlow sums over layers. Differs:
        no.
    """
    check_choice("reduction", reduction, ("sum", "mean"))
    if not torch.compiler.is_compiling():
        check_number("load_balance_weight", load_balance_weight, least=0)
        check_number("router_z_weight", router_z_weight, least=0)
    _refuse_empty(routers)
    losses = [
        load_balance_weight * router.losses.load_balance_loss
        + router_z_weight * router.losses.router_z_loss
        for router in routers
    ]
    total = functools.reduce(torch.add, losses)
    return total / len(losses) if reduction == "mean" else total


def total_stats(routers: Sequence[RouterOutput]) -> RouterStats:
    """Returns the statistics of all layers together; a token counts once for each layer.

    Args:
        routers: From `collect_routers`.

    Raises:
        DataError: When there are no routers, or they differ in the number of experts or of places.
    """
    _refuse_empty(routers)
    shapes = [
        (router.stats.expert_load.numel(), router.stats.dropped_by_place.numel())
        for router in routers
    ]
    first, others = shapes[0], [index for index, shape in enumerate(shapes) if shape != shapes[0]]
    if others:
        num_experts, places = shapes[others[0]]
        raise DataError(
            f"Layer {others[0]} has {num_experts} experts and {places} places for each token, layer 0 has {first[0]} "
            f"and {first[1]}: their loads cannot be added. Give total_stats layers of the same shape only."
        )
    return functools.reduce(add_stats, [router.stats for router in routers])


def _refuse_empty(routers: Sequence[RouterOutput]) -> None:
    """Raises a DataError when there are no routers."""
    if not routers:
        raise DataError(
            "There are no router outputs: no sparse layer has run yet. Call the model inside "
            "`with collect_routers(model) as routers:`, and only then ask for losses or statistics."
        )


class _Collector:
    """The hooks of one context, and what they noticed."""

    def __init__(self, token_mask: Tensor | None) -> None:
        self.token_mask = token_mask
        self.routers: list[RouterOutput] = []
        self.wants_gradient = torch.is_grad_enabled()
        self.must_recompute = False
        self.recomputed = False

    def give_mask(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns the layer's arguments with the mask, unless the caller gave one."""
        given = args[1] if len(args) > 1 else kwargs.get("token_mask")
        if self.token_mask is None or given is not None:
            return None
        self.recomputed |= _in_backward()
        self.must_recompute |= _checkpointed()
        return args[:1], {**kwargs, "token_mask": self.token_mask}

    def record(
        self, layer: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, RouterOutput]
    ) -> None:
        """Appends what the router did, unless activation checkpointing only calls the layer again."""
        if _in_backward():
            return
        if self.wants_gradient and layer.training and not torch.is_grad_enabled():
            raise ConfigError(
                "A sparse layer in training ran without gradient inside a context that was opened with it. If this is "
                "activation checkpointing, set use_reentrant=False: the reentrant kind loses the gradient of the "
                "routers' losses. If no gradient is wanted, open torch.no_grad() around collect_routers."
            )
        self.routers.append(output[1])

    def check_backward(self) -> None:
        """Raises a ConfigError when a later backward pass would call the layers again without their
        mask.
        """
        if self.must_recompute and not self.recomputed:
            raise ConfigError(
                "collect_routers ended before the backward pass, but activation checkpointing will call the sparse "
                "layers again there, and then without their token_mask. Call loss.backward() inside the context, or "
                "open torch.no_grad() around it if no gradient is wanted."
            )


def _in_backward() -> bool:
    """Returns whether a backward pass calls this, so that a forward pass in it is a recomputation."""
    return ModuleTracker().is_bw


def _checkpointed() -> bool:
    """Returns whether non-reentrant checkpointing will call what runs now again; torch has no
    public word for it.
    """
    top_hooks = getattr(
        getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None
    )
    hooks = top_hooks(True) if top_hooks else None
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__
