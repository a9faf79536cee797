"""Records the routing of batches, token by token.

Comes after `trace`; `trace_file` writes the same while it is made.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe.checks import check, check_integer
from moe.data.pipeline import Batch
from moe.errors import DataError
from moe.sparse.adapters import unwrapped
from moe.sparse.editing import LayerKey, Stack, sparse_layers
from moe.sparse.groups import from_groups
from moe.sparse.layer import RouterOutput
from moe.sparse.stats import RouterStats
from moe.tracing.trace import (
    ACCEPTED,
    FORMAT_VERSION,
    LayerFacts,
    Trace,
    TraceFacts,
    expert_dtype,
    trace_from,
)

_HASHED = ("encoder.lengths", "encoder.ids", "decoder.lengths", "decoder.ids")


class Provenance(NamedTuple):
    """The origin of a trace; unknown fields are empty.

    Attributes:
        text: Description of the examples.
        model: Origin of the model, as named by the user.
        model_fingerprint: Identifies the model's files.
        tokenizer_fingerprint: The same of the tokenizer.
        command: The command that recorded it.
    """

    text: str = ""
    model: str = ""
    model_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    command: str = ""


class TracedBatch(NamedTuple):
    """A batch, and the origin of its examples.

    Attributes:
        batch: With labels and one example in each row, on the model's device.
        documents: Number of the document of each example.
        domains: Name of the kind of text of each example.
        num_given: First tokens of the labels that answers are given, such as their language.
    """

    batch: Batch
    documents: Sequence[int]
    domains: Sequence[str]
    num_given: int = 0


def traced_batches(batches: Iterable[Batch], domain: str = "") -> Iterator[TracedBatch]:
    """Yields batches in which each example is its own document, all from one domain."""
    num_documents = 0
    for batch in batches:
        num_rows = batch["labels"].shape[0]
        documents = range(num_documents, num_documents + num_rows)
        yield TracedBatch(batch, documents, [domain] * num_rows)
        num_documents += num_rows


def record_routing(
    model: PreTrainedModel,
    batches: Iterable[TracedBatch],
    *,
    num_best: int = 0,
    provenance: Provenance = Provenance(),  # noqa: B008  an immutable tuple
) -> Trace:
    """Returns the routing of every token of the batches, in evaluation mode.

    Args:
        model: Ours or a host with sparse layers; the mode of each of its parts is restored.
        batches: Examples; see `traced_batches`.
        num_best: M: the experts of highest probability that are kept with their probabilities.
        provenance: Where the trace comes from.

    Raises:
        ConfigError: When `num_best` is not between 0 and the number of experts.
        DataError: When a batch has no labels, or is packed.
    """
    recording = Recording(model, num_best=num_best)
    parts: dict[str, list[Tensor]] = {}
    for batch in batches:
        for name, rows in recording.record(batch).items():
            parts.setdefault(name, []).append(rows)

    # Autocast cannot join the half precision of probabilities.
    with torch.autocast("cpu", enabled=False):
        tensors = {name: torch.cat(rows) for name, rows in parts.items()}
    return trace_from(recording.facts(provenance), tensors, recording.stats)


# ---------------------------------------------------------------------------
# What goes into the model


def unpacked(batch: Batch) -> Batch:
    """Returns a batch with a mask instead of its segments.

    Raises:
        DataError: When it has no labels, or a row holds several examples.
    """
    names = ("segment_ids", "decoder_segment_ids")
    segments = [batch[name] for name in names if name in batch]
    is_packed = any(int(numbers.max()) > 1 for numbers in segments)
    if "labels" not in batch or is_packed:
        raise DataError(
            "A batch to trace needs labels, and one example in each row: "
            "the decoder's tokens come from the labels. "
            "Give batches that are not packed."
        )

    # Segment 1 is the example, 0 is padding; a mask marks the same.
    plain = {name: values for name, values in batch.items() if name not in names}
    if "segment_ids" in batch:
        plain["attention_mask"] = (batch["segment_ids"] != 0).long()
    return plain


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode inside the block; each part gets its own mode back."""
    parts_in_training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in parts_in_training:
            part.training = True


# ---------------------------------------------------------------------------
# Recording


class Recording:
    """Records batch by batch; the caller keeps the rows.

    Rows with the same name must be concatenated, in the order of the batches.

    Attributes:
        stats: Summed statistics of each layer.
    """

    def __init__(self, model: PreTrainedModel, *, num_best: int = 0) -> None:
        self._model = model
        self._num_best = num_best
        self._layers: list[LayerFacts] = []
        for (stack, number), layer in sparse_layers(model).items():
            config = layer.config
            reason = f"{stack} layer {number} has so many experts"
            check_integer("num_best", num_best, least=0, most=config.num_experts, reason=reason)
            num_choices = unwrapped(layer.router).num_choices(config)
            facts = LayerFacts(stack, number, config.num_experts, num_choices, config.router)
            self._layers.append(facts)

        # Sums over batches.
        self.stats: dict[LayerKey, RouterStats] = {}
        self._num_examples = 0
        self._domains: dict[str, int] = {}
        self._digests = {name: hashlib.sha256() for name in _HASHED}
        self._loss_sum = 0.0
        self._num_targets = 0

    @torch.no_grad()
    def record(self, traced: TracedBatch) -> dict[str, Tensor]:
        """Returns the rows of one batch by name, e.g. `encoder.0.expert`, on the CPU.

        Raises:
            ConfigError: When it is not a TracedBatch.
            DataError: When the batch has no labels, or is packed.
        """
        is_traced = isinstance(traced, TracedBatch)
        check(is_traced, "A batch to record", traced, "a TracedBatch; see traced_batches")
        batch = unpacked(traced.batch)
        if "input_ids" not in batch:
            raise DataError("A batch to trace needs input_ids: sounds and images have none.")
        ids = batch["input_ids"]
        labels = batch["labels"]
        decoder_ids = cast(Any, self._model).prepare_decoder_input_ids_from_labels(labels)
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        is_target = labels != -100

        # Evaluation mode: no jitter, no dropout, and the capacity of evaluation.
        with evaluation_mode(self._model):
            output = self._model(**batch, output_router_logits=True, use_cache=False)
        num_targets = int(is_target.sum())
        self._loss_sum += float(output.ce_loss) * num_targets
        self._num_targets += num_targets

        # Rows of examples, and the targets of the decoder.
        self._num_examples += len(traced.documents)
        numbers = [self._domains.setdefault(name, len(self._domains)) for name in traced.domains]
        rows = {
            "document": torch.tensor(list(traced.documents), dtype=torch.int32),
            "domain": torch.tensor(numbers, dtype=torch.int32),
            "decoder.targets": labels[is_target].int().cpu(),
        }
        rows |= self._record_stack("encoder", ids, mask, output.encoder_router_outputs)
        rows |= self._record_stack("decoder", decoder_ids, is_target, output.decoder_router_outputs)
        return rows

    def _record_stack(
        self, stack: Stack, ids: Tensor, is_real: Tensor, routers: Sequence[RouterOutput] | None
    ) -> dict[str, Tensor]:
        """Returns the rows of a stack, which reads <int64>[B, L]; <bool>[B, L] is False at padding."""
        # Tokens without padding, one example after the other.
        rows = {
            f"{stack}.ids": ids[is_real].int().cpu(),
            f"{stack}.lengths": is_real.sum(dim=1).cpu(),
        }
        for name, values in rows.items():
            self._digests[name].update(values.numpy().tobytes())

        # Layer by layer: rows to keep, and sums to add up.
        for layer, router in enumerate(routers or ()):
            for name, values in _layer_rows(router, is_real, self._num_best).items():
                rows[f"{stack}.{layer}.{name}"] = values.cpu()

            stats = RouterStats(*(value.cpu() for value in router.stats))
            earlier = self.stats.get((stack, layer))
            self.stats[stack, layer] = stats if earlier is None else earlier + stats
        return rows

    def facts(self, provenance: Provenance) -> TraceFacts:
        """Returns the trace recorded so far.

        Raises:
            DataError: When that is nothing.
        """
        if not self._num_examples:
            raise DataError("There is nothing to trace: no examples were given.")

        # One hash of several: the same however the examples were divided into batches.
        fingerprint = hashlib.sha256()
        for name in _HASHED:
            fingerprint.update(self._digests[name].digest())
        return TraceFacts(
            version=FORMAT_VERSION,
            library=version("stmoe"),
            inputs_fingerprint=fingerprint.hexdigest(),
            num_examples=self._num_examples,
            domains=list(self._domains),
            layers=self._layers,
            loss=self._loss_sum / max(1, self._num_targets),
            **provenance._asdict(),
        )


def _layer_rows(router: RouterOutput, is_real: Tensor, num_best: int) -> dict[str, Tensor]:
    """Returns the rows of one layer; <bool>[B, L] says which tokens are real, N of them."""
    plan = router.plan
    num_experts = router.router_logits.shape[-1]
    dtype = expert_dtype(num_experts)
    sequences = plan.token_mask.shape[1] // is_real.shape[1]

    def rows(x: Tensor) -> Tensor:
        return from_groups(x, sequences)[is_real]  # [G, S, ...] -> [N, ...]

    # Not requested, refused, accepted.
    expert = rows(plan.expert_index)  # [N, K]
    requested = rows(plan.requested)
    state = requested.to(torch.uint8)
    state[rows(plan.accepted)] = ACCEPTED

    # First choice: of the experts that a token requested, the one with the highest logit.
    logits = rows(router.router_logits).float()  # [N, E]
    wanted = logits.gather(-1, expert).masked_fill(~requested, float("-inf"))
    first = expert.gather(1, wanted.argmax(dim=-1, keepdim=True)).squeeze(1)  # [N]
    first = first.masked_fill(~requested.any(dim=-1), -1)

    # The best by probability, regardless of the choice.
    best = logits.softmax(dim=-1).topk(num_best)
    return {
        "expert": expert.to(dtype),
        "state": state,
        "gate": rows(plan.combine_weight).float(),
        "first": first.to(dtype),
        "best_expert": best.indices.to(dtype),
        "best_prob": best.values.half(),
    }
