"""Bytes of activations: what the graph of one forward pass keeps for its backward pass.

The terms follow the modules line by line; a letter is a size as in the docstrings there, H and F
those of this rank. The kernels are those of an accelerator, or, to be held against a count by
saved-tensor hooks, those of a CPU, which
differ in three places: its norm keeps the normalised input too, its attention with a learned bias
keeps the probabilities, and its experts keep other rows. What a kernel holds only while it runs is
not counted.
"""

from typing import NamedTuple

from moe.distributed.mesh import MeshConfig
from moe.models.configuration import STMoEConfig
from moe.planning.workload import StackPass, Workload, stack_passes

_WIDE = 4
"""Bytes of a number in the residual stream, norms, router and loss: float32."""


class Activations(NamedTuple):
    """Bytes of one rank.

    Attributes:
        saved: What saved-tensor hooks see of a forward pass.
        held: What stacks hold beside that while they run, or run again: position biases with masks,
            and the memory.
        recomputed: What the largest block saves when activation checkpointing runs it again; else
            0.
    """

    saved: int
    held: int
    recomputed: int

    @property
    def total(self) -> int:
        """All at once, in the backward pass of the largest block."""
        return self.saved + self.held + self.recomputed


class _Sizes(NamedTuple):
    """Letters: widths of this rank, and bytes of a number in a product.

    Attributes:
        config: Of the model.
        H: Heads here.
        A: Heads here x d_kv.
        F: Hidden units here.
        w: Bytes of a number in a product.
        cpu: Whether the kernels are those of a CPU.
        spread: Whether experts are on other ranks too.
        masked: Whether every sequence has masks of its own.
    """

    config: STMoEConfig
    H: int
    A: int
    F: int
    w: int
    cpu: bool
    spread: bool
    masked: bool

    @property
    def copies(self) -> bool:
        """Whether every product makes a copy of its float32 input."""
        return self.w < _WIDE


def activations(
    config: STMoEConfig, workload: Workload, mesh: MeshConfig, *, cpu: bool = False
) -> Activations:
    """Returns what one forward pass of a rank keeps.

    Args:
        config: Of the model.
        workload: Rows, lengths, precision, checkpointing.
        mesh: Sizes.
        cpu: Whether to count the kernels of a CPU instead of an accelerator's.
    """
    heads = config.num_heads // mesh.tp
    sizes = _Sizes(
        config,
        H=heads,
        A=heads * config.d_kv,
        F=config.d_ff // mesh.tp,
        w=workload.product_bytes,
        cpu=cpu,
        spread=mesh.ep > 1,
        masked=workload.masked,
    )
    encoder, decoder = stack_passes(config, workload, mesh)
    saved, largest = _head(sizes, decoder), 0
    for stack, memory in ((encoder, None), (decoder, encoder)):
        saved += _outside(sizes, stack, memory)
        for layer in range(stack.num_blocks):
            sparse = config.is_sparse_block(layer, decoder=stack.decoder)
            block = _block(sizes, stack, memory, sparse)
            largest = max(largest, block)
            saved += (
                stack.num_tokens * config.d_model * _WIDE
                if workload.activation_checkpointing
                else block
            )
    held = sum(_bias(sizes, stack) * _WIDE for stack in (encoder, decoder))
    memory = encoder.num_tokens * config.d_model * _WIDE
    if sizes.copies or workload.activation_checkpointing:
        held += memory
    else:
        saved += memory  # once for all keys and values
    return Activations(saved, held, largest if workload.activation_checkpointing else 0)


def _head(s: _Sizes, stack: StackPass) -> int:
    """Returns what the head and the loss keep: the last states, logits and log-probabilities."""
    tokens = stack.num_tokens
    return tokens * (s.config.d_model * s.w + 2 * s.config.vocab_size * _WIDE + 8 + 1 + _WIDE)


def _bias(s: _Sizes, stack: StackPass) -> int:
    """Returns the numbers of the bias of self-attention."""
    return s.H * stack.length * stack.length * (stack.num_rows if s.masked else 1)


def _outside(s: _Sizes, stack: StackPass, memory: StackPass | None) -> int:
    """Returns what a stack keeps beside its blocks: ids, buckets, masks, the final norm, the
    memory.
    """
    tokens, length = stack.num_tokens, stack.length
    total = 8 * tokens + 8 * length * length + tokens * length * s.masked + _norm(s, tokens)
    if memory is not None:
        total += 0 if s.copies or not s.masked else tokens * memory.length * _WIDE
    return total + 2 * _dropped(s, tokens * s.config.d_model, wide=True)


def _norm(s: _Sizes, tokens: int) -> int:
    """Returns what a norm keeps, its input being the residual stream that nothing else keeps."""
    return tokens * (s.config.d_model * _WIDE * (2 if s.cpu else 1) + _WIDE)


def _dropped(s: _Sizes, numel: int, rate: float | None = None, *, wide: bool = False) -> int:
    """Returns the mask of dropout over so many numbers; that of a CPU is in their dtype, `wide`
    says float32.
    """
    width = (_WIDE if wide else s.w) if s.cpu else 1
    return numel * width if (s.config.dropout_rate if rate is None else rate) else 0


def _block(s: _Sizes, stack: StackPass, memory: StackPass | None, sparse: bool) -> int:
    """Returns what a block keeps."""
    total = _attention(s, stack, None)
    if memory is not None:
        total += _attention(s, stack, memory)
    if sparse:
        total += _sparse(s, stack)
    if not sparse or s.config.sparse_dense_stacking:
        total += _feed_forward(s, stack.num_tokens)
    return total


def _attention(s: _Sizes, stack: StackPass, memory: StackPass | None) -> int:
    """Returns what an attention layer keeps with its norm; over `memory` if there is one."""
    tokens, D = stack.num_tokens, s.config.d_model
    source = stack if memory is None else memory
    total = _norm(s, tokens) + _dropped(s, tokens * D)
    if not s.copies:
        total += (
            tokens * D * _WIDE
        )  # for all three products; the memory is kept once for all blocks
    else:
        total += (tokens + 2 * source.num_tokens) * D * s.w  # one for each product
    total += (2 * tokens + 2 * source.num_tokens) * s.A * s.w  # query and output, key and value
    drops = s.config.dropout_rate > 0
    if s.cpu and (drops or memory is None):
        scores = s.H * tokens * source.length * (3 if drops else 1)
        return total + scores * _WIDE + (tokens + 2 * source.num_tokens) * s.A * (_WIDE - s.w)
    total += s.H * tokens * _WIDE  # logsumexp of the scores
    if s.copies:  # of the bias
        total += (_bias(s, stack) if memory is None else tokens * source.length * s.masked) * s.w
    return total


def _feed_forward(s: _Sizes, tokens: int) -> int:
    """Returns what a dense feed-forward layer keeps with its norm."""
    D = s.config.d_model
    hidden = 4 if s.config.feed_forward_proj == "gated-gelu" else 1
    total = _norm(s, tokens) + tokens * (D + hidden * s.F) * s.w
    return total + _dropped(s, tokens * D) + _dropped(s, tokens * s.F)


def _sparse(s: _Sizes, stack: StackPass) -> int:
    """Returns what a sparse layer keeps with its norm."""
    tokens, rows, D = stack.num_tokens, stack.expert_rows, s.config.d_model
    total = _norm(s, tokens) + _dropped(s, tokens * D)
    total += tokens * D * _WIDE  # the router's input, padding masked
    total += tokens * (
        2 * s.config.num_experts * _WIDE + 3 * _WIDE + stack.places * (8 + 2 * _WIDE + 1)
    )
    gated = s.config.feed_forward_proj == "gated-gelu"
    if s.config.dispatch == "static":
        hidden = 4 if gated else 1
        total += (
            rows * (3 * D + hidden * s.F) * s.w + rows * (8 + _WIDE) + 8 * tokens * stack.places
        )
    else:
        hidden = (3 if gated else 1) if s.cpu else (4 if gated else 1)
        inputs = tokens if s.cpu and not s.spread else rows
        total += (inputs * D + rows * D + rows * hidden * s.F) * s.w + rows * (8 + _WIDE)
    return total + _dropped(s, rows * s.F, s.config.expert_dropout_rate)
