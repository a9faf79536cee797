"""Records the routing of batches, token by token.

Comes after `trace`; `trace_file` writes the same while it is made.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe.checks import check, check_integer
from moe.data.pipeline import Batch
from moe.errors import DataError
from moe.sparse.editing import Stack, sparse_layers
from moe.sparse.groups import from_groups
from moe.sparse.layer import RouterOutput
from moe.sparse.stats import RouterStats, add_stats
from moe.tracing.trace import (
    ACCEPTED,
    STACKS,
    LayerFacts,
    Trace,
    TraceFacts,
    expert_dtype,
    id_dtype,
    trace_from,
)

FORMAT_VERSION = 1

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
    """

    batch: Batch
    documents: Sequence[int]
    domains: Sequence[str]


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
    return trace_from(recording.facts(provenance), tensors | recording.totals())


# ---------------------------------------------------------------------------
# What goes into the model


class StackInputs(NamedTuple):
    """The tokens that go into a stack.

    Attributes:
        ids: <int64>[B, L] token ids.
        is_real: <bool>[B, L] False at padding.
    """

    ids: Tensor
    is_real: Tensor


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
    plain = dict(batch)
    for name in names:
        plain.pop(name, None)
    if "segment_ids" in batch:
        plain["attention_mask"] = (batch["segment_ids"] != 0).long()
    return plain


def stack_inputs(model: PreTrainedModel, batch: Batch) -> dict[Stack, StackInputs]:
    """Returns the tokens that a batch, see `unpacked`, puts into each stack.

    The decoder's token at a position is its input there.
    """
    input_ids = batch["input_ids"]
    input_mask = batch.get("attention_mask", torch.ones_like(input_ids))
    labels = batch["labels"]
    decoder_ids = cast(Any, model).prepare_decoder_input_ids_from_labels(labels)
    return {
        "encoder": StackInputs(input_ids, input_mask.bool()),
        "decoder": StackInputs(decoder_ids, labels != -100),
    }


def layer_facts(model: nn.Module) -> list[LayerFacts]:
    """Returns the descriptions of a model's sparse layers, the encoder's first."""
    layers = []
    for (stack, number), layer in sparse_layers(model).items():
        config = layer.config
        facts = LayerFacts(
            stack=stack,
            layer=number,
            num_experts=config.num_experts,
            num_choices=type(layer.router).num_choices(config),
            router=config.router,
        )
        layers.append(facts)
    return layers


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
    """Records batch by batch; the caller keeps the results.

    Rows with the same name must be concatenated, in the order of the batches.
    """

    def __init__(self, model: PreTrainedModel, *, num_best: int = 0) -> None:
        self._model = model
        self._num_best = num_best
        self._id_dtype = id_dtype(model.config.vocab_size)
        self._layers = layer_facts(model)
        for layer in self._layers:
            reason = f"{layer.stack} layer {layer.layer} has so many experts"
            check_integer("num_best", num_best, least=0, most=layer.num_experts, reason=reason)

        # Sums over batches.
        self._stats: dict[tuple[Stack, int], RouterStats] = {}
        self._lengths: dict[Stack, list[Tensor]] = {stack: [] for stack in STACKS}
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
        expected = "a TracedBatch; traced_batches(...) makes them of batches"
        check(isinstance(traced, TracedBatch), "A batch to record", traced, expected)
        batch = unpacked(traced.batch)
        inputs = stack_inputs(self._model, batch)

        # Evaluation mode: no jitter, no dropout, and the capacity of evaluation.
        with evaluation_mode(self._model):
            output = self._model(**batch, output_router_logits=True, use_cache=False)
        num_targets = int(inputs["decoder"].is_real.sum())
        self._loss_sum += float(output.ce_loss) * num_targets
        self._num_targets += num_targets
        routers = {
            "encoder": output.encoder_router_outputs,
            "decoder": output.decoder_router_outputs,
        }

        # Rows of examples, and the targets of the decoder.
        numbers = [self._domains.setdefault(name, len(self._domains)) for name in traced.domains]
        rows = {
            "document": torch.tensor(list(traced.documents), dtype=torch.int32),
            "domain": torch.tensor(numbers, dtype=torch.int32),
            "decoder.targets": batch["labels"][inputs["decoder"].is_real].to(self._id_dtype).cpu(),
        }
        for stack in STACKS:
            rows |= self._record_stack(stack, inputs[stack], routers[stack])
        return rows

    def _record_stack(
        self, stack: Stack, inputs: StackInputs, routers: Sequence[RouterOutput] | None
    ) -> dict[str, Tensor]:
        """Returns the rows of a stack."""
        is_real = inputs.is_real
        # Tokens without padding, one example after the other.
        real_ids = inputs.ids[is_real].to(self._id_dtype).cpu()
        lengths = is_real.sum(dim=1).cpu()
        self._lengths[stack].append(lengths)
        self._digests[f"{stack}.lengths"].update(lengths.numpy().tobytes())
        self._digests[f"{stack}.ids"].update(real_ids.int().numpy().tobytes())

        # Layer by layer: rows to keep, and sums to add up.
        rows = {f"{stack}.ids": real_ids}
        for layer, router in enumerate(routers or ()):
            for name, values in _layer_rows(router, is_real, self._num_best).items():
                rows[f"{stack}.{layer}.{name}"] = values.cpu()

            stats = RouterStats(*(value.cpu() for value in router.stats))
            earlier = self._stats.get((stack, layer))
            self._stats[stack, layer] = stats if earlier is None else add_stats(earlier, stats)
        return rows

    def totals(self) -> dict[str, Tensor]:
        """Returns the tensors that are not rows: where examples start, and the statistics."""
        # An example ends where the next one starts.
        tensors = {}
        for stack, lengths in self._lengths.items():
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0)
            tensors[f"{stack}.starts"] = ends
        for (stack, layer), stats in self._stats.items():
            for name, value in stats._asdict().items():
                tensors[f"{stack}.{layer}.stats.{name}"] = value
        return tensors

    def facts(self, provenance: Provenance) -> TraceFacts:
        """Returns the trace recorded so far.

        Raises:
            DataError: When that is nothing.
        """
        num_examples = sum(lengths.numel() for lengths in self._lengths["encoder"])
        if not num_examples:
            raise DataError("There is nothing to trace: no examples were given.")

        return TraceFacts(
            version=FORMAT_VERSION,
            library=version("stmoe"),
            inputs_fingerprint=_join_digests(self._digests),
            num_examples=num_examples,
            domains=list(self._domains),
            layers=self._layers,
            loss=self._loss_sum / max(1, self._num_targets),
            **provenance._asdict(),
        )


def inputs_fingerprint(trace: Trace) -> str:
    """Returns the SHA-256 of the token ids of a trace, for `TraceFacts.inputs_fingerprint`."""
    digests = {name: hashlib.sha256() for name in _HASHED}
    for stack in STACKS:
        part = trace.stack(stack)
        digests[f"{stack}.lengths"].update(part.starts.diff().numpy().tobytes())
        digests[f"{stack}.ids"].update(part.ids.numpy().tobytes())
    return _join_digests(digests)


def _join_digests(digests: Mapping[str, Any]) -> str:
    """Returns one hash of several, the same however the examples were divided into batches."""
    joined = hashlib.sha256()
    for name in _HASHED:
        joined.update(digests[name].digest())
    return joined.hexdigest()


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
