"""Forward passes of an ablation: of an unedited batch and of edited ones.

Comes after `interventions`; `ablate` adds up the changes of the loss. Nothing is computed twice: an
ablated layer of the decoder reuses the encoder's output, and every layer the hidden state before its
block.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe.data.pipeline import Batch
from moe.models.inputs import IGNORED_LABEL
from moe.models.losses import target_losses
from moe.sparse.editing import LayerKey, PlanEdit, edit_routing, sparse_layers
from moe.sparse.plan import DispatchPlan, RouterScores


def right_answers(output: Any, batch: Batch) -> Tensor:
    """Returns <bool>[B]: whether the most probable token is the target at all targets of a row.

    As in greedy decoding, the first wrong token decides: those before it are the targets.
    """
    labels = batch["labels"]
    is_right = output.logits.argmax(dim=-1) == labels  # [B, T]
    return (is_right | (labels == IGNORED_LABEL)).all(dim=1)


class Unchanged(NamedTuple):
    """A batch, and the outputs of the model on it without ablation.

    Attributes:
        batch: The batch.
        losses: <float64>[n] of the target tokens.
        is_right: <bool>[B] whether greedy decoding gives the targets of each row.
        plans: The plan of each sparse layer.
        encoder_outputs: Output of the encoder.
        before: Output of the block before each sparse layer's, if there is one.
    """

    batch: Batch
    losses: Tensor
    is_right: Tensor
    plans: dict[LayerKey, DispatchPlan]
    encoder_outputs: Any
    before: dict[LayerKey, Any]


@torch.inference_mode()
def run_unchanged(model: PreTrainedModel, batch: Batch) -> Unchanged:
    """Returns the outputs of a model in evaluation mode on a batch."""
    outputs: dict[Any, Any] = {}
    plans: dict[LayerKey, DispatchPlan] = {}

    def keep_plan(key: LayerKey, scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
        plans[key] = plan
        return plan

    def keep_output(key: LayerKey | str, part: nn.Module, args: object, output: object) -> None:
        outputs[key] = output

    # Starting points of later passes: outputs of the encoder, and of the blocks before sparse ones.
    layers = sparse_layers(model)
    edits: dict[LayerKey, PlanEdit] = {key: partial(keep_plan, key) for key in layers}
    with ExitStack() as contexts:
        contexts.enter_context(edit_routing(model, edits))
        encoder = model.get_encoder()
        contexts.enter_context(encoder.register_forward_hook(partial(keep_output, "encoder")))
        for key in layers:
            for block in _blocks_before(model, key)[-1:]:
                contexts.enter_context(block.register_forward_hook(partial(keep_output, key)))
        output = model(**batch, use_cache=False)

    return Unchanged(
        batch=batch,
        losses=target_losses(output.logits, batch["labels"]),
        is_right=right_answers(output, batch).cpu(),
        plans=plans,
        encoder_outputs=outputs.pop("encoder"),
        before=outputs,
    )


@torch.inference_mode()
def run_ablated(
    model: PreTrainedModel,
    key: LayerKey,
    unchanged: Unchanged,
    ablation: AbstractContextManager[None],
) -> tuple[Tensor, Tensor]:
    """Returns what an ablation changes in a batch, on the CPU.

    Args:
        model: In evaluation mode.
        key: Name of the layer that is ablated.
        unchanged: Outputs on the batch without ablation.
        ablation: Context that ablates something in this layer only.

    Returns:
        <float64>[n] change of the loss of each target, in nats, and <bool>[B] whether greedy
        decoding still gives the targets of each row.
    """
    # Blocks before the layer compute the same as without the ablation.
    stack, _ = key
    skipped = _blocks_before(model, key)

    # So does the encoder, if the layer is in the decoder.
    arguments: dict[str, Any] = {**unchanged.batch, "use_cache": False}
    if stack == "decoder":
        arguments["encoder_outputs"] = unchanged.encoder_outputs

    with ablation, _skip_blocks(skipped, unchanged.before.get(key)):
        output = model(**arguments)
    losses = target_losses(output.logits, unchanged.batch["labels"])
    is_right = right_answers(output, unchanged.batch)
    return (losses - unchanged.losses).cpu(), is_right.cpu()


def _blocks_before(model: PreTrainedModel, key: LayerKey) -> list[nn.Module]:
    """Returns the blocks before the one of a sparse layer, in its stack."""
    layer = sparse_layers(model)[key]

    # The blocks of a stack are the outermost list around the layer.
    for stack in model.modules():
        blocks: list[nn.Module] = []
        for block in stack if isinstance(stack, nn.ModuleList) else ():
            if any(part is layer for part in block.modules()):
                return blocks
            blocks.append(block)
    return []


@contextmanager
def _skip_blocks(blocks: Sequence[nn.Module], output: object) -> Iterator[None]:
    """Makes blocks return the known output of the last one without computing it again."""

    def skip(*_: object, **__: object) -> object:
        return output

    # An attribute of a module hides the method of its class.
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
