"""Sets of target tokens by class, and the document of each, by which an ablation is split.

Comes before `ablation`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe.errors import DataError
from moe.models.inputs import IGNORED_LABEL
from moe.sparse.editing import Stack
from moe.tracing.recorder import TracedBatch

ALL_TOKENS = "all tokens"
"""Name of the set of all target tokens."""


class Targets(NamedTuple):
    """The N target tokens of some batches, in the order of `Trace.decoder`.

    Attributes:
        example: <int64>[N] number of the example of each.
        document: <int64>[N] number of the document of each, from 0.
        sizes: How many of them each batch has.
        input_example: <int64>[M] number of the example of each encoder token.
        num_examples: Number of examples.
        num_documents: Number of documents, G.
    """

    example: Tensor
    document: Tensor
    sizes: list[int]
    input_example: Tensor
    num_examples: int
    num_documents: int


def list_targets(batches: Sequence[TracedBatch]) -> Targets:
    """Returns the origin of the target tokens of batches.

    Raises:
        DataError: When a batch has no labels or has segments, or there is no target at all.
    """
    examples: list[Tensor] = []
    documents: list[Tensor] = []
    input_examples: list[Tensor] = []
    number_of: dict[int, int] = {}  # of a document, by its name
    num_examples = 0
    for batch, row_documents, *_ in batches:
        if "labels" not in batch or "segment_ids" in batch:
            raise DataError(
                "A batch to ablate experts on needs labels and no segment_ids: each row is one example, and the loss "
                "is that of its labels. Give batches that are not packed."
            )

        # Numbers of the examples and documents of the rows.
        labels = batch["labels"].cpu()
        example = torch.arange(labels.shape[0]) + num_examples  # [B]
        num_examples += labels.shape[0]
        numbers = [number_of.setdefault(name, len(number_of)) for name in row_documents]
        document = torch.tensor(numbers)  # [B]

        # The same for each target token.
        is_target = labels != IGNORED_LABEL  # [B, T]
        row, _ = is_target.nonzero(as_tuple=True)
        examples.append(example[row])
        documents.append(document[row])

        # The same for encoder tokens, which are all real if there is no mask.
        no_padding = torch.ones_like(batch["input_ids"])
        input_mask = batch.get("attention_mask", no_padding)
        input_row, _ = input_mask.cpu().nonzero(as_tuple=True)
        input_examples.append(example[input_row])

    sizes = [example.numel() for example in examples]
    if not sum(sizes):
        raise DataError(
            f"There is nothing to measure a loss on: {len(sizes)} batches have no target token. Give batches whose "
            "labels are not all -100."
        )
    return Targets(
        example=torch.cat(examples),
        document=torch.cat(documents),
        sizes=sizes,
        input_example=torch.cat(input_examples),
        num_examples=num_examples,
        num_documents=len(number_of),
    )


def target_sets(
    targets: Targets, classes: Mapping[str, Tensor], input_classes: Mapping[str, Tensor] | None
) -> dict[Stack, dict[str, Tensor]]:
    """Returns sets of target tokens <bool>[N] by name for the layers of each stack, ALL_TOKENS first.

    For the decoder, the sets are the classes. For the encoder there are also, for each class, all
    targets of sequences that contain it: an expert of the encoder changes all targets of a sequence, through
    cross-attention.

    Args:
        targets: The target tokens.
        classes: <bool>[N] by name.
        input_classes: <bool>[M] by name, of the encoder's tokens: a sequence holds the class where
            one of them is of it. None for the sequences whose targets hold one of `classes`.
    """
    sets = {ALL_TOKENS: torch.ones_like(targets.example, dtype=torch.bool)}
    for name, mask in classes.items():
        sets[name] = mask.cpu()

    # From tokens to the examples that hold one, and to all targets of these.
    held = classes if input_classes is None else input_classes
    example = targets.example if input_classes is None else targets.input_example
    sequence_sets = dict(sets)
    for name, mask in held.items():
        holds_class = torch.zeros(targets.num_examples, dtype=torch.bool)
        holds_class[example[mask.cpu()]] = True
        sequence_sets[f"sequences with {name}"] = holds_class[targets.example]  # [N]
    return {"encoder": sequence_sets, "decoder": sets}
