"""The sparse layer in a block of a host, and how it is told which tokens are padding.

A host hands hidden states alone to its feed-forward. So the stack makes a `LayerCall` of its own
mask and passes it to its blocks as a keyword argument, and each block passes it on to its sparse
layer. Activation checkpointing repeats a block with the same arguments, so with the same call.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from moe.hosts.host import Host
from moe.hosts.settings import HostSettings
from moe.sparse.config import SparseConfig
from moe.sparse.editing import Stack
from moe.sparse.integration import SparseFeedForwardAdapter


class LayerCall(NamedTuple):
    """Inputs of a sparse layer besides the hidden states.

    Attributes:
        token_mask: <bool>[B, L] real tokens; None when all are.
        drop_tokens: Whether the capacity holds; it does not in decoding step by step.
    """

    token_mask: Tensor | None = None
    drop_tokens: bool = True


class HostFeedForward(SparseFeedForwardAdapter):
    """The sparse layer at the place of a host's feed-forward."""

    call = LayerCall()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output <dtype of x>[B, L, D] for tokens <any float>[B, L, D]."""
        return self.sparse(x, self.call.token_mask, drop_tokens=self.call.drop_tokens)[0]


class SparseBlock:
    """A host's block that passes the call of its stack on to its sparse layer."""

    feed_forward: str

    def forward(self, *args: Any, layer_call: LayerCall | None = None, **kwargs: Any) -> Any:
        """Returns what the host's block returns."""
        feed_forward = getattr(self, self.feed_forward)
        if isinstance(feed_forward, HostFeedForward):
            feed_forward.call = layer_call or LayerCall()
        return cast(Any, super()).forward(*args, **kwargs)


@functools.cache
def sparse_block_class(block_class: type[nn.Module], feed_forward: str) -> type[nn.Module]:
    """Returns a subclass of a host's block that is a SparseBlock.

    Args:
        block_class: Class of the block.
        feed_forward: Name of the feed-forward in it.
    """
    name = f"Sparse{block_class.__name__}"
    return type(name, (SparseBlock, block_class), {"feed_forward": feed_forward})


class Site(NamedTuple):
    """A feed-forward of a host that is sparse, or will be.

    Attributes:
        name: Name of the block in the model.
        stack: Its stack.
        block: The block.
        config: Settings of the sparse layer.
    """

    name: str
    stack: Stack
    block: nn.Module
    config: SparseConfig


def sparse_sites(model: nn.Module, host: Host, settings: HostSettings) -> Iterator[Site]:
    """Yields the places of the sparse layers, the encoder's first."""
    stacks: tuple[Stack, ...] = ("encoder", "decoder")
    for stack in stacks:
        decoder = stack == "decoder"
        place = host.stack(decoder=decoder)
        for layer, number in enumerate(settings.blocks(decoder=decoder)):
            of_host = cast(Any, model).config
            config = settings.sparse_config(host, of_host, decoder=decoder, layer=layer)
            name = f"{place.module}.{place.blocks}.{number}"
            yield Site(name, stack, model.get_submodule(name), config)


def prepare_blocks(model: nn.Module, host: Host) -> set[str]:
    """Lets stacks and blocks of a model pass on the calls of sparse layers.

    Returns:
        The names of the classes of the blocks.
    """
    names: set[str] = set()
    for decoder in (False, True):
        stack = host.stack_module(model, decoder=decoder)
        give_call = functools.partial(_give_call, decoder=decoder)
        stack.register_forward_pre_hook(give_call, with_kwargs=True)
        for block in getattr(stack, host.stack(decoder=decoder).blocks):
            block.__class__ = sparse_block_class(type(block), host.feed_forward)
            names.add(type(block).__name__)
    return names


def _give_call(
    stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, decoder: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a stack: returns its arguments with the call of its sparse layers."""
    kwargs = dict(kwargs)
    routing_mask = kwargs.pop("decoder_routing_mask", None)
    inputs = inspect.signature(stack.forward).bind_partial(*args, **kwargs).arguments
    mask = inputs.get("attention_mask")

    # Positions of this call. A mask of all pairs of tokens does not say which are padding.
    token_mask = routing_mask if decoder else None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        tokens = inputs.get("input_ids")
        if tokens is None:
            tokens = inputs["inputs_embeds"]
        token_mask = mask[:, -tokens.shape[1] :].bool()

    # A cache means decoding.
    cached = bool(inputs.get("use_cache")) or inputs.get("past_key_values") is not None
    return args, {**kwargs, "layer_call": LayerCall(token_mask, drop_tokens=not cached)}
