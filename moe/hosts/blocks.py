"""The sparse layer in a block of a host, and how it is told which tokens are padding.

A host hands hidden states alone to its feed-forward. So the stack makes a `LayerCall` of its own
mask and passes it to its blocks as a keyword argument, and each block passes it on to its sparse
layer. Activation checkpointing repeats a block with the same arguments, so with the same call.
"""

import functools
import inspect
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from moe.hosts.host import Host
from moe.sparse.editing import STACKS
from moe.sparse.integration import SparseFeedForwardAdapter


class LayerCall(NamedTuple):
    """Inputs of a sparse layer besides the hidden states.

    Attributes:
        token_mask: <bool>[B, L or more] real tokens, the last L those of this call; None when all
            are.
        drop_tokens: Whether the capacity holds; it does not in decoding step by step.
    """

    token_mask: Tensor | None = None
    drop_tokens: bool = True


class HostFeedForward(SparseFeedForwardAdapter):
    """The sparse layer at the place of a host's feed-forward."""

    call = LayerCall()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output <dtype of x>[B, L, D] for tokens <any float>[B, L, D]."""
        # A mask of a decoder also has the tokens of earlier calls.
        mask = self.call.token_mask
        mask = None if mask is None else mask[:, -x.shape[1] :]
        return self.sparse(x, mask, drop_tokens=self.call.drop_tokens)[0]


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

    It has the same name, by which FSDP and `_no_split_modules` find blocks.

    Args:
        block_class: Class of the block.
        feed_forward: Name of the feed-forward in it.
    """
    return type(block_class.__name__, (SparseBlock, block_class), {"feed_forward": feed_forward})


def prepare_blocks(model: nn.Module, host: Host) -> None:
    """Lets stacks and blocks of a model pass on the calls of sparse layers."""
    for name in STACKS:
        stack = host.stack(model, name)
        give_call = functools.partial(_give_call, decoder=name == "decoder")
        stack.register_forward_pre_hook(give_call, with_kwargs=True)
        for block in stack.layers:
            block.__class__ = sparse_block_class(type(block), host.feed_forward)


def _give_call(
    stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, decoder: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a stack: returns its arguments with the call of its sparse layers."""
    kwargs = dict(kwargs)
    routing_mask = kwargs.pop("decoder_routing_mask", None)
    inputs = inspect.signature(stack.forward).bind_partial(*args, **kwargs).arguments

    # A mask of all pairs of tokens does not say which are padding. An encoder of audio has no mask:
    # it reads silence like sound.
    mask = inputs.get("attention_mask")
    token_mask = routing_mask if decoder else None
    has_ids = stack.main_input_name == "input_ids"
    if isinstance(mask, Tensor) and mask.dim() == 2 and has_ids:
        token_mask = mask.bool()

    # A cache means decoding.
    cached = bool(inputs.get("use_cache")) or inputs.get("past_key_values") is not None
    return args, {**kwargs, "layer_call": LayerCall(token_mask, drop_tokens=not cached)}
