"""Forward passes of an ablation: a batch as it is, and with something ablated in one layer.

Comes after `expert_measures`; `ablation` adds up what it returns. Nothing is computed twice: an
ablated layer of the decoder reuses the encoder's output, and every layer the hidden state before its
block.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.data.pipeline import Batch
from moe.inspection.ablation.expert_measures import observe_layers, target_losses
from moe.models.blocks import Block, BlockOutput
from moe.models.inputs import IGNORED_LABEL
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.outputs import STMoEEncoderOutput, STMoEOutput
from moe.sparse.editing import LayerKey, Stack, sparse_layers
from moe.sparse.plan import DispatchPlan


class Unchanged(NamedTuple):
    """A batch, and what the model does with it when nothing is ablated.

    Attributes:
        batch: The batch.
        losses: <float64>[n] of the target tokens.
        plans: The plan of each sparse layer.
        encoder_outputs: Output of the encoder.
        hidden_states: <float>[B, L, D] before each block of each stack.
    """

    batch: Batch
    losses: Tensor
    plans: dict[LayerKey, DispatchPlan]
    encoder_outputs: STMoEEncoderOutput
    hidden_states: dict[Stack, Sequence[Tensor]]


@torch.inference_mode()
def run_unchanged(model: STMoEForConditionalGeneration, batch: Batch) -> Unchanged:
    """Returns what a model in evaluation mode does with a batch."""
    with observe_layers(model) as observations:
        output: STMoEOutput = model(**batch, use_cache=False, output_hidden_states=True)

    # What later passes start from.
    memory = output.encoder_last_hidden_state
    hidden_states: dict[Stack, Sequence[Tensor]] = {
        "encoder": output.encoder_hidden_states or (),
        "decoder": output.decoder_hidden_states or (),
    }
    plans: dict[LayerKey, DispatchPlan] = {}
    for key, observation in observations.items():
        plans[key] = observation.plan
    return Unchanged(
        batch=batch,
        losses=target_losses(output, batch),
        plans=plans,
        encoder_outputs=STMoEEncoderOutput(last_hidden_state=memory),
        hidden_states=hidden_states,
    )


@torch.inference_mode()
def loss_change(
    model: STMoEForConditionalGeneration,
    key: LayerKey,
    unchanged: Unchanged,
    ablation: AbstractContextManager[None],
) -> Tensor:
    """Returns the change of the loss <float64>[n] of each target, in nats, on the CPU.

    Args:
        model: In evaluation mode.
        key: Name of the layer that is ablated.
        unchanged: The batch, and what the model does with it.
        ablation: The context that ablates something in that layer, and nowhere else.
    """
    # Blocks before the layer do what they did without the ablation.
    stack, _ = key
    skipped = _blocks_before(model, key)
    hidden = unchanged.hidden_states[stack][len(skipped)]

    # The encoder does too, where the layer is one of the decoder.
    arguments: dict[str, Any] = {**unchanged.batch, "use_cache": False}
    if stack == "decoder":
        arguments["encoder_outputs"] = unchanged.encoder_outputs

    with ablation, _skip_blocks(skipped, hidden):
        output = model(**arguments)
    losses = target_losses(output, unchanged.batch)
    return (losses - unchanged.losses).cpu()


def _blocks_before(model: STMoEForConditionalGeneration, key: LayerKey) -> list[Block]:
    """Returns the blocks before that of a sparse layer, in its stack."""
    stacks = {"encoder": model.model.encoder.stack, "decoder": model.model.decoder}
    layer = sparse_layers(model)[key]

    # In order, up to the one that the layer is in.
    blocks: list[Block] = []
    for block in stacks[key[0]].blocks:
        if any(part is layer for part in block.modules()):
            break
        blocks.append(cast(Block, block))
    return blocks


@contextmanager
def _skip_blocks(blocks: Sequence[nn.Module], hidden: Tensor) -> Iterator[None]:
    """Lets blocks return <float>[B, L, D] at once, which they would otherwise compute again."""
    output = BlockOutput(hidden=hidden, router=None, self_weights=None, cross_weights=None)

    def skip(*_: object) -> BlockOutput:
        return output

    # An attribute of a module comes before the method of its class.
    earlier = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = skip
    try:
        yield
    finally:
        for block, forward in zip(blocks, earlier, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


def works_on(key: LayerKey, unchanged: Unchanged, num_experts: int) -> Tensor:
    """Returns <bool>[E, n]: the targets that each expert of a layer works on.

    In the encoder an expert works on all targets of a sequence with an input token that it accepts.
    """
    # Which experts each token reaches.
    plan = unchanged.plans[key]
    one_hot = F.one_hot(plan.expert_index, num_experts)  # [G, S, K, E]
    accepts = (one_hot.bool() & plan.accepted[..., None]).any(dim=2)  # [G, S, E]

    # The decoder has a token at the position of each target.
    labels = unchanged.batch["labels"]
    is_target = labels != IGNORED_LABEL  # [B, T]
    accepts = accepts.flatten(0, 1).unflatten(0, (labels.shape[0], -1))  # [B, L, E]
    if key[0] == "decoder":
        return accepts[is_target].T.cpu()

    # The encoder's tokens affect all targets of their sequence.
    row, _ = is_target.nonzero(as_tuple=True)  # [n]
    return accepts.any(dim=1)[row].T.cpu()
