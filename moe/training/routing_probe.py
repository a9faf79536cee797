"""The probe of a run: the routing of a fixed text, recorded at regular intervals.

The training loop and RouterStatsCallback record it; moe/tracing/probe_file.py stores and reads it.
A probe does not affect the run: it changes no weight, mode or random number generator.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe.data.pipeline import ALL_ROWS, Batch, BatchSource
from moe.distributed.collectives import broadcast_from_rank_zero, gather_or_raise
from moe.distributed.mesh import Mesh
from moe.distributed.random_numbers import seeded_random_numbers
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.outputs import STMoEOutput
from moe.sparse.editing import LayerKey, sparse_layers
from moe.sparse.layer import RouterOutput
from moe.sparse.stats import RouterStats, add_stats, router_values
from moe.tracing.probe_file import Probe, begin_probes, probe_facts, probe_text, write_probe
from moe.tracing.recorder import Recording, traced_batches
from moe.tracing.trace import NOT_REQUESTED
from moe.training.heldout_loss import to_device
from moe.training.metrics import Histogram
from moe.training.recipe import Recipe
from moe.training.step import router_outputs

PROBE_FOLDER = "probe"

_SEED = 0
_ENTROPY_BUCKETS = 32

# Buckets of |logit|: from 1/16 to 4096 by factors of the square root of 2.
_LOGIT_EDGES = tuple(2 ** (exponent / 2) for exponent in range(-8, 25))


class LayerScores(NamedTuple):
    """Scores of one router for the text.

    Attributes:
        stats: Sums and counts, as in any evaluation.
        max_logit: <float64>[] largest |logit| of a real token.
        logit_counts: <int64>[34] tokens by their largest |logit|.
        entropy_counts: <int64>[32] tokens by the entropy of their probabilities, in equal steps
            from 0 to log E.
    """

    stats: RouterStats
    max_logit: Tensor
    logit_counts: Tensor
    entropy_counts: Tensor


Scores = Mapping[LayerKey, LayerScores]
"""Scores of each sparse layer."""


class ProbeResult(NamedTuple):
    """The result of a probe, over all ranks.

    Attributes:
        choices: See `Probe`.
        scores: Scores of each sparse layer.
    """

    choices: dict[LayerKey, Tensor]
    scores: dict[LayerKey, LayerScores]


def check_probe(recipe: Recipe, config: STMoEConfig, source: BatchSource | None) -> None:
    """Raises if there is nothing to probe.

    Args:
        recipe: Determines how often the run is probed.
        config: Config of the model.
        source: The text; None for none.

    Raises:
        ConfigError: When the model has no router, or there is no text.
    """
    every = recipe.training.probe_every
    if not every:
        return

    num_encoder_layers = config.num_sparse_encoder_layers
    num_decoder_layers = config.num_sparse_decoder_layers
    if not num_encoder_layers + num_decoder_layers:
        raise ConfigError(
            f"training.probe_every is {every}, "
            "but the model has no sparse layer whose routing could be recorded. "
            "Set it to 0."
        )
    if source is None:
        raise ConfigError(
            f"training.probe_every is {every}, "
            "but there is no held-out text to probe. "
            "Train on tasks with a dev split, or set it to 0."
        )


class RoutingProbe:
    """Records the routing of a fixed text repeatedly, and stores it in a folder.

    Every rank calls it; rank zero writes.

    Args:
        folder: The folder `probe` of a run.
        model: Whole, or sharded over `mesh`.
        source: Its first batches are the text.
        num_batches: Number of those batches.
        text: Description of the text.
        mesh: The ranks that share each batch; None if each process reads all of it.
        bfloat16: Whether to compute in autocast, as the model is trained.
    """

    def __init__(
        self,
        folder: Path,
        model: STMoEForConditionalGeneration,
        source: BatchSource,
        num_batches: int,
        *,
        text: str,
        mesh: Mesh | None = None,
        bfloat16: bool = False,
    ) -> None:
        self._folder = folder
        self._model = model
        self._source = source
        self._num_batches = num_batches
        self._mesh = mesh
        self._bfloat16 = bfloat16

        # Every rank has the whole text, and records its own rows of it.
        self._text = probe_text(model, self._batches(ALL_ROWS))
        self._facts = probe_facts(model, self._text, text)

    def begin(self, step: int) -> None:
        """Prepares the folder for the probes that follow `step` updates.

        Raises:
            DataError: When earlier probes in it could not be compared with those to come.
        """
        broadcast_from_rank_zero(lambda: begin_probes(self._folder, self._facts, self._text, step))

    def record(self, step: int) -> ProbeResult:
        """Records and writes the routing after `step` updates."""
        # This rank's rows, computed as in training.
        rows = ALL_ROWS
        if self._mesh:
            rows = self._mesh.rows(self._source.batch_size)
        device = self._model.device
        bfloat16 = self._bfloat16
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)
        with seeded_random_numbers(_SEED, device), autocast:
            part = _record_rows(self._model, self._batches(rows))

        # Values of all ranks.
        parts = [part]
        if self._mesh:
            parts = gather_or_raise(lambda: part, self._mesh.data)
        result = _join(parts)

        probe = Probe(step, result.choices)
        broadcast_from_rank_zero(lambda: write_probe(self._folder, probe, self._facts))
        return result

    def _batches(self, rows: slice) -> Iterator[Batch]:
        for index in range(self._num_batches):
            batch = self._source.batch(index, rows)
            yield to_device(batch, self._model.device)


# ---------------------------------------------------------------------------
# Recording


def _record_rows(
    model: STMoEForConditionalGeneration, batches: Iterator[Batch]
) -> tuple[list[dict[LayerKey, Tensor]], Scores]:
    """Returns the choices of each sparse layer by batch, and its scores over all; on the CPU."""
    keys = list(sparse_layers(model))
    recording = Recording(model)
    choices = []
    scores: dict[LayerKey, LayerScores] = {}

    # The recorder stores the routing; a hook collects the logits.
    def add_scores(model: nn.Module, inputs: tuple[Any, ...], output: STMoEOutput) -> None:
        routers = router_outputs(output)
        for key, router in zip(keys, routers, strict=True):
            layer_scores = _layer_scores(router)
            if key in scores:
                layer_scores = _add_scores(scores[key], layer_scores)
            scores[key] = layer_scores

    hook = model.register_forward_hook(add_scores)
    try:
        for batch in traced_batches(batches):
            rows = recording.record(batch)
            choices.append({key: _ordered_choices(key, rows) for key in keys})
    finally:
        hook.remove()
    return choices, scores


def _ordered_choices(key: LayerKey, rows: Mapping[str, Tensor]) -> Tensor:
    """Returns <int8 or int16>[N, K] of a layer: first choice, further ones, -1 for none."""
    stack, layer = key
    expert = rows[f"{stack}.{layer}.expert"]  # [N, K]
    state = rows[f"{stack}.{layer}.state"]
    first = rows[f"{stack}.{layer}.first"]  # [N]
    choices = expert.masked_fill(state == NOT_REQUESTED, -1)

    # If tokens choose, a plan has this order already; if experts choose, it is ordered by expert.
    is_first = choices == first[:, None]
    place = torch.where(is_first, 0, 1).masked_fill(choices < 0, 2)
    return choices.gather(1, place.argsort(dim=1, stable=True))


@torch.no_grad()
def _layer_scores(router: RouterOutput) -> LayerScores:
    """Returns the scores of a layer's real tokens in one batch."""
    is_real = router.plan.token_mask  # [G, S]
    logits = router.router_logits[is_real]
    logits = logits.double()  # [N, E]
    num_experts = logits.shape[-1]

    # Entropy of a softmax: logsumexp(x) - sum_i p_i x_i.
    probs = logits.softmax(dim=-1)
    mean_logit = (probs * logits).sum(dim=-1)
    entropy = logits.logsumexp(dim=-1) - mean_logit  # [N]
    inner_edges = _entropy_edges(num_experts)[1:-1]

    # A rank may have no real token at all.
    largest = logits.abs().amax(dim=-1)  # [N]
    max_logit = torch.zeros((), dtype=torch.float64)
    if largest.numel():
        max_logit = largest.amax().cpu()

    return LayerScores(
        stats=RouterStats(*(value.cpu() for value in router.stats)),
        max_logit=max_logit,
        logit_counts=_count(largest, _LOGIT_EDGES),
        entropy_counts=_count(entropy, inner_edges),
    )


def _entropy_edges(num_experts: int) -> list[float]:
    """Returns the edges of the buckets of entropy, both ends included."""
    highest = math.log(max(2, num_experts))
    width = highest / _ENTROPY_BUCKETS
    return [width * number for number in range(_ENTROPY_BUCKETS + 1)]


def _count(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Returns <int64>[edges + 1]: number of values below the first edge, between edges, and above."""
    inner = torch.tensor(edges, dtype=values.dtype, device=values.device)
    bucket = torch.bucketize(values, inner, right=True)
    return torch.bincount(bucket, minlength=len(edges) + 1).cpu()


def _add_scores(a: LayerScores, b: LayerScores) -> LayerScores:
    """Returns the scores of both together."""
    return LayerScores(
        stats=add_stats(a.stats, b.stats),
        max_logit=torch.maximum(a.max_logit, b.max_logit),
        logit_counts=a.logit_counts + b.logit_counts,
        entropy_counts=a.entropy_counts + b.entropy_counts,
    )


def _join(parts: Sequence[tuple[list[dict[LayerKey, Tensor]], Scores]]) -> ProbeResult:
    """Returns the records of all ranks, in the order of a single process."""
    choices: dict[LayerKey, Tensor] = {}
    scores: dict[LayerKey, LayerScores] = {}
    for key in parts[0][1]:
        # The rows of a batch are distributed over the ranks in order.
        rows = []
        for batch_of_ranks in zip(*(batches for batches, _ in parts), strict=True):
            rows += [batch[key] for batch in batch_of_ranks]
        choices[key] = torch.cat(rows)
        scores[key] = reduce(_add_scores, [rank_scores[key] for _, rank_scores in parts])
    return ProbeResult(choices, scores)


# ---------------------------------------------------------------------------
# Numbers and histograms


def probe_values(scores: Scores) -> dict[str, float]:
    """Returns `probe/{stack}/{layer}/...` for each sparse layer, layers counted from 0.

    They are the `router_values` of the text in evaluation mode, and `max_logit`.
    """
    values: dict[str, float] = {}
    for (stack, layer), layer_scores in scores.items():
        name = f"{stack}/{layer}"
        stats = router_values(name, layer_scores.stats)
        for reported, value in stats.items():
            values["probe/" + reported.removeprefix("router/")] = value
        values[f"probe/{name}/max_logit"] = float(layer_scores.max_logit)
    return values


def max_logits(scores: Scores) -> dict[LayerKey, float]:
    """Returns the largest |logit| of each sparse layer."""
    logits = {}
    for key, layer_scores in scores.items():
        logits[key] = float(layer_scores.max_logit)
    return logits


def probe_histograms(scores: Scores) -> dict[str, Histogram]:
    """Returns the histograms of each sparse layer.

    Returns:
        `probe/{stack}/{layer}/load`: requests of each expert, expert e in the bucket around e.
        `.../token_max_logit`: tokens by their largest |logit|. `.../token_entropy`: tokens by the
        entropy of their probabilities, in nats.
    """
    histograms = {}
    for (stack, layer), layer_scores in scores.items():
        name = f"probe/{stack}/{layer}"

        # One bucket for each expert.
        load = layer_scores.stats.expert_load
        num_experts = load.numel()
        edges = [expert - 0.5 for expert in range(num_experts + 1)]
        histograms[f"{name}/load"] = Histogram(edges, load.tolist())

        # Values beyond the edges count in the first and the last bucket.
        edges = [0.0, *_LOGIT_EDGES, 2 * _LOGIT_EDGES[-1]]
        counts = layer_scores.logit_counts.tolist()
        histograms[f"{name}/token_max_logit"] = Histogram(edges, counts)

        edges = _entropy_edges(num_experts)
        counts = layer_scores.entropy_counts.tolist()
        histograms[f"{name}/token_entropy"] = Histogram(edges, counts)
    return histograms
