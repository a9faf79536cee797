"""How much of a dense layer's output a sparse layer of its copies keeps, and which settings lose the rest.

Comes after `upcycle`. Experts that are copies turn the layer's output into the dense one times the
sum of a token's gates, and times the scale of the experts' output.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from moe.data.pipeline import Batch
from moe.models.inputs import IGNORED_LABEL
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.editing import LayerKey, edit_routing, sparse_layers
from moe.sparse.plan import DispatchPlan, RouterScores
from moe.sparse.router import Router

_TOLERANCE = 1e-3


class Kept(NamedTuple):
    """Mean over tokens of the sum of gates times the scale, in one mode.

    Attributes:
        chosen: Of all choices of a token.
        requested: Of the choices that the policy requests.
        accepted: Of the choices that get a slot: the share of the dense output.
    """

    chosen: float
    requested: float
    accepted: float


class KeptOutput(NamedTuple):
    """Share of the output that one layer keeps.

    Attributes:
        key: The layer.
        training: With the capacity and policy of training.
        evaluation: With the settings of evaluation.
    """

    key: LayerKey
    training: Kept
    evaluation: Kept

    def losses(self) -> list[str]:
        """Returns which settings change the output in training, and by how much."""
        chosen, requested, accepted = self.training
        reasons = []
        if abs(chosen - 1) > _TOLERANCE:
            reasons.append(f"the gates of a token, times the scale, sum to {chosen:.2f}")
        if chosen - requested > _TOLERANCE:
            lost = 1 - requested / chosen
            reasons.append(f"the policy for second experts leaves out {100 * lost:.0f} %")
        if requested - accepted > _TOLERANCE:
            lost = 1 - accepted / requested
            reasons.append(f"the capacity drops {100 * lost:.0f} %")
        return reasons


class _Sums:
    """Sums of gates over tokens, gathered from the plans of one router."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.gates = torch.zeros(3, dtype=torch.float64)  # chosen, requested, accepted
        self.num_tokens = 0

    def add(self, scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
        """Adds the tokens of a plan and returns it unchanged."""
        gates = self.router.gates(scores, plan.expert_index)  # [G, S, K]
        real = plan.token_mask[..., None]
        # Experts that choose request what fits into their capacity.
        requested = real if self.router.experts_choose else plan.requested
        choices: list[Tensor] = [gates * real, gates * requested, plan.combine_weight]
        self.gates += torch.stack([weights.double().sum() for weights in choices]).cpu()
        self.num_tokens += int(plan.token_mask.sum())
        return plan

    def kept(self, scale: float) -> Kept:
        """Returns the means."""
        return Kept(*(scale * self.gates / max(1, self.num_tokens)).tolist())


def without_labels(model: STMoEForConditionalGeneration, batch: Batch) -> Batch:
    """Returns inputs that route the same tokens, but have no loss."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    inputs["decoder_attention_mask"] = labels != IGNORED_LABEL
    return inputs


@torch.no_grad()
def kept_output(
    model: STMoEForConditionalGeneration, batches: Iterable[Batch], *, scale: float = 1.0
) -> list[KeptOutput]:
    """Returns what each layer of an upcycled model keeps of the dense output on some batches.

    Args:
        model: The model, whole and in evaluation mode, before any training.
        batches: Keyword arguments of its forward, with labels.
        scale: Factor on the experts' output that the model was made with.
    """
    kept: dict[bool, list[Kept]] = {}
    layers = sparse_layers(model)
    examples = list(batches)
    for training in (True, False):
        sums = {key: _Sums(layer.router) for key, layer in layers.items()}
        for layer in layers.values():
            layer.router.train(training)
        with edit_routing(model, {key: layer_sums.add for key, layer_sums in sums.items()}):
            for batch in examples:
                inputs = without_labels(model, batch)
                model(**inputs, logits_to_keep=1, use_cache=False)
        kept[training] = [layer_sums.kept(scale) for layer_sums in sums.values()]

    rows = zip(layers, kept[True], kept[False], strict=True)
    return [KeptOutput(key, training, evaluation) for key, training, evaluation in rows]
