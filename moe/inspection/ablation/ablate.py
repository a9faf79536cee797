"""Ablation: how much every expert of every sparse layer contributes to each class of tokens.

Comes after `interventions`, `ablation_runs` and `target_sets`; `ablation_table` interprets the
sums.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from moe.checks import check, check_choice
from moe.inspection.ablation.ablation_runs import Unchanged, run_ablated, run_unchanged, works_on
from moe.inspection.ablation.interventions import INTERVENTIONS, ablate_expert, as_many_at_random
from moe.inspection.ablation.target_sets import Targets, list_targets, target_sets
from moe.sparse.editing import LayerKey, check_layer, sparse_layers
from moe.tracing.recorder import TracedBatch, evaluation_mode


class LayerAblation(NamedTuple):
    """Sums of the effects of ablating each of the E experts of a layer on G documents.

    The C sets are classes of target tokens; the first one contains all tokens.

    Attributes:
        key: Name of the layer.
        sets: Names of the sets.
        num_tokens: <float64>[C, G] target tokens of each set.
        change: <float64>[E, C, G] change of their loss, in nats.
        random_change: <float64>[E, C, G] change when as many choices, drawn at random in each
            sequence, are ablated instead of the expert's.
        chosen_tokens: <float64>[E, G] target tokens that the expert works on; in the encoder,
            target tokens of the sequences in which it processes an input token.
        chosen_change: <float64>[E, G] change of their loss.
        load: <int64>[E] accepted choices of each expert.
        peer: <int64>[E] the other expert of nearest load.
        lost: <bool>[E, X] whether the targets of each of the X examples are right without the
            ablation of the expert and wrong with it.
    """

    key: LayerKey
    sets: tuple[str, ...]
    num_tokens: Tensor
    change: Tensor
    random_change: Tensor
    chosen_tokens: Tensor
    chosen_change: Tensor
    load: Tensor
    peer: Tensor
    lost: Tensor


class Ablation(NamedTuple):
    """The ablation of every expert of some layers.

    Attributes:
        intervention: Name of the intervention.
        loss: Mean loss of the target tokens without ablation, in nats.
        num_targets: Number of target tokens, N.
        num_documents: Number of documents, G.
        recalled: <bool>[X] examples whose targets greedy decoding gives without ablation.
        layers: One for each layer, the encoder's first.
    """

    intervention: str
    loss: float
    num_targets: int
    num_documents: int
    recalled: Tensor
    layers: tuple[LayerAblation, ...]


def ablate_experts(
    model: PreTrainedModel,
    batches: Iterable[TracedBatch],
    classes: Mapping[str, Tensor],
    *,
    intervention: str = "drop",
    input_classes: Mapping[str, Tensor] | None = None,
    layers: Iterable[LayerKey] | None = None,
    progress: bool = True,
) -> Ablation:
    """Returns the effect of ablating each expert on the loss of every class, in evaluation mode.

    Every expert costs two forward passes of each batch: one without it, and one in which as many
    random choices are ablated likewise. Runs with ablated decoder experts reuse the encoder's
    output.

    Example:
        ablation = ablate_experts(model, traced_batches(batches), {"numbers": is_number})
        print(verdict_table(class_verdicts(ablation)))

    Args:
        model: A whole model on one rank; its training mode is restored.
        batches: Examples with labels, on the model's device; see `traced_batches`.
        classes: <bool>[N] by name: which of the target tokens belong to the class, in the order of
            `Trace.decoder`. Classes may overlap; {} for none.
        intervention: Name in INTERVENTIONS of the change to each expert.
        input_classes: <bool>[M] by name: likewise for the encoder's tokens, in the order of
            `Trace.encoder`. Experts of the encoder get a set `sequences with NAME` for each: all
            targets of sequences that hold such a token. None for the sequences whose targets hold
            one of `classes`.
        layers: Names of the layers; None for all.
        progress: Whether to show a progress bar.

    Raises:
        ConfigError: When there is no such intervention or layer, or an argument is out of range.
        DataError: When there is no batch, or one has no labels or has segments.
    """
    check_choice("intervention", intervention, INTERVENTIONS)
    keys = _checked_keys(model, layers)

    # Sets of target tokens by which the loss is split.
    batches = list(batches)
    targets = list_targets(batches)
    sets = target_sets(targets, classes, input_classes)

    tables = [_empty_sums(key, num_experts, sets[key[0]], targets) for key, num_experts in keys]

    # No jitter, no dropout, and the capacity of evaluation.
    with evaluation_mode(model):
        # Every expert on every batch.
        total_loss = 0.0
        recalled: list[Tensor] = []
        num_runs = len(batches) * sum(table.load.numel() for table in tables)
        bar = tqdm(total=num_runs, desc=f"Ablate ({intervention})", disable=not progress)
        parts = torch.arange(targets.document.numel()).split(targets.sizes)  # targets by batch
        for number, (traced, part) in enumerate(zip(batches, parts, strict=True)):
            unchanged = run_unchanged(model, traced.batch)
            total_loss += float(unchanged.losses.sum())
            first = sum(map(len, recalled))
            recalled.append(unchanged.is_right)
            rows = slice(first, first + len(unchanged.is_right))

            # Each batch and layer has its own random choices.
            for table_number, table in enumerate(tables):
                numbers = np.random.SeedSequence((0, number, table_number))
                lot = int(numbers.generate_state(1)[0])
                masks = torch.stack(list(sets[table.key[0]].values()))[:, part]
                document = targets.document[part]
                lost = table.lost[:, rows]
                _ablate_layer(
                    model, table, unchanged, document, masks, lost, intervention, lot, bar
                )
        bar.close()

    return Ablation(
        intervention=intervention,
        loss=total_loss / targets.document.numel(),
        num_targets=targets.document.numel(),
        num_documents=targets.num_documents,
        recalled=torch.cat(recalled),
        layers=tuple(table._replace(peer=nearest_load(table.load)) for table in tables),
    )


def nearest_load(load: Tensor) -> Tensor:
    """Returns <int64>[E]: the other expert with the nearest load <int64>[E]; ties go to the lower number."""
    distance = (load[:, None] - load[None, :]).abs().double()  # [E, E]
    return distance.fill_diagonal_(float("inf")).argmin(dim=1)


def _checked_keys(
    model: PreTrainedModel, layers: Iterable[LayerKey] | None
) -> list[tuple[LayerKey, int]]:
    """Returns names and numbers of experts of the layers to ablate, in the order of the model."""
    model_layers = sparse_layers(model)
    wanted = list(model_layers if layers is None else layers)

    # The layers must exist and have experts to compare.
    for key in wanted:
        check_layer(key, model_layers, model)
    check(bool(wanted), "layers to ablate", wanted, "at least one sparse layer")

    keys = []
    for key, layer in model_layers.items():
        num_experts = layer.config.num_experts
        if key in wanted:
            expected = "at least 2, to compare them"
            check(num_experts > 1, f"num_experts of {key}", num_experts, expected)
            keys.append((key, num_experts))
    return keys


# ---------------------------------------------------------------------------
# Sums over documents


def _empty_sums(
    key: LayerKey, num_experts: int, sets: Mapping[str, Tensor], targets: Targets
) -> LayerAblation:
    """Returns the sums of a layer before any batch."""
    num_documents = targets.num_documents
    masks = torch.stack(list(sets.values()))  # [C, N]
    by_set = torch.zeros(num_experts, len(sets), num_documents, dtype=torch.float64)
    by_expert = torch.zeros(num_experts, num_documents, dtype=torch.float64)
    load = torch.zeros(num_experts, dtype=torch.int64)
    return LayerAblation(
        key=key,
        sets=tuple(sets),
        num_tokens=_by_document(masks, targets.document, num_documents),
        change=by_set,
        random_change=by_set.clone(),
        chosen_tokens=by_expert,
        chosen_change=by_expert.clone(),
        load=load,
        peer=load.clone(),
        lost=torch.zeros(num_experts, targets.num_examples, dtype=torch.bool),
    )


def _by_document(values: Tensor, document: Tensor, num_documents: int) -> Tensor:
    """Returns the sums <float64>[..., G] of <any>[..., n] over the documents <int64>[n]."""
    shape = (*values.shape[:-1], num_documents)
    sums = torch.zeros(shape, dtype=torch.float64)
    return sums.index_add(-1, document, values.double())


@torch.inference_mode()
def _ablate_layer(
    model: PreTrainedModel,
    sums: LayerAblation,
    unchanged: Unchanged,
    document: Tensor,
    masks: Tensor,
    lost: Tensor,
    intervention: str,
    lot: int,
    bar: "tqdm[NoReturn]",
) -> None:
    """Adds the effect of ablating each expert of a layer on the targets of one batch.

    Args:
        model: In evaluation mode.
        sums: Sums of the layer.
        unchanged: The batch, and the results of the unchanged model.
        document: <int64>[n] document of each target.
        masks: <bool>[C, n] sets of the targets.
        lost: <bool>[E, B] of the batch; see `LayerAblation`.
        intervention: Its name.
        lot: Seed of the random choices.
        bar: Counts the experts.
    """
    num_experts, num_documents = sums.chosen_tokens.shape
    key = sums.key
    is_chosen = works_on(key, unchanged, num_experts)  # [E, n]
    plan = unchanged.plans[key]
    load = torch.bincount(plan.expert_index[plan.accepted], minlength=num_experts)
    sums.load.add_(load.cpu())

    def add(total: Tensor, values: Tensor) -> None:
        total += _by_document(values, document, num_documents)

    add(sums.chosen_tokens, is_chosen)
    num_sequences = unchanged.batch["labels"].shape[0]
    for expert in range(num_experts):
        # Ablate the expert and, for comparison, as many random choices.
        at_random = as_many_at_random(expert, num_sequences=num_sequences, seed=lot)
        to_expert = ablate_expert(intervention, model, key, expert)
        change, is_right = run_ablated(model, key, unchanged, to_expert)  # [n], [B]
        lost[expert] = unchanged.is_right & ~is_right
        to_random = INTERVENTIONS[intervention](model, key, at_random)
        random_change, _ = run_ablated(model, key, unchanged, to_random)

        # By class and document.
        add(sums.change[expert], change * masks)
        add(sums.random_change[expert], random_change * masks)
        add(sums.chosen_change[expert], change * is_chosen[expert])
        bar.update()
