"""Sentences of the page on routers, from the numbers of a trace, of metrics or of an evaluation."""

import math

from moe.data.pipeline import SpanCorruptionSource
from moe.inspection.formatting import format_versions
from moe.inspection.page.report_inputs import Evaluation, Line, Stage, TaskScores
from moe.inspection.tables import LayerCounts, load_shares
from moe.models.configuration import STMoEConfig
from moe.sparse.stats import summarize
from moe.tracing.trace import layer_name

_LARGEST_EXPONENT = 700.0  # of e, below the largest float


def size_sentence(config: STMoEConfig) -> str:
    """Returns the sizes of the model as a sentence."""
    if config.expert_capacity is not None:
        capacity = f"{config.expert_capacity} slots of an expert in each {config.capacity_scope}"
    else:
        training = _capacity_factor(config.capacity_factor)
        evaluation = _capacity_factor(config.eval_capacity_factor)
        capacity = f"capacity factor {training} in training and {evaluation} in evaluation"
    return (
        f"A sparse encoder-decoder of {config.num_parameters():,} parameters, of which one token uses "
        f"{config.num_active_parameters():,}: {config.num_layers} + {config.num_decoder_layers} blocks, "
        f"{config.num_sparse_encoder_layers} + {config.num_sparse_decoder_layers} sparse layers of "
        f"{config.num_experts} experts, at most {config.num_selected_experts} for each token; {capacity}."
    )


def _capacity_factor(factor: float | None) -> str:
    return "none" if factor is None else f"{factor:g}"


def batches_sentence(source: SpanCorruptionSource, num_batches: int) -> str:
    """Returns how many batches were traced, and how much of the text they cover."""
    # Examples repeat with other masks once all chunks of the text are used.
    num_examples = num_batches * source.batch_size
    num_chunks = source.num_examples
    coverage = f"{num_examples:,} of the {num_chunks:,} examples that this text gives, each once"
    if num_examples > num_chunks:
        coverage = (
            f"{num_examples:,} drawn from the {num_chunks:,} that this text gives, each about "
            f"{num_examples / num_chunks:.1f} times, masked anew each time"
        )
    inputs_length, targets_length = source.lengths
    return (
        f"{num_batches:,} of {source.batch_size} examples, each of {inputs_length} encoder and "
        f"{targets_length} decoder tokens: {coverage}"
    )


def layer_sentence(layer: LayerCounts) -> str:
    """Returns the load and the entropy of a layer in words."""
    shares = load_shares(layer)
    num_experts = len(shares)
    busiest = shares.index(max(shares))
    idlest = shares.index(min(shares))
    entropy = summarize(layer.stats)["entropy"]
    return (
        f"{layer_name(layer.key)}: expert {busiest + 1} gets the most requests, "
        f"{num_experts * shares[busiest]:.2f} x the even load, and expert {idlest + 1} the fewest, "
        f"{num_experts * shares[idlest]:.2f} x. On average the router is as undecided about a token as between "
        f"{math.exp(entropy):.1f} equally good experts of {num_experts} ({entropy:.2f} nats)."
    )


# ---------------------------------------------------------------------------
# Training


def run_sentences(stage: Stage) -> list[str]:
    """Returns the last measurements of a run."""
    sentences = []
    line = stage.last("heldout/text_loss")
    if line:
        loss = _format_finite(line["heldout/text_loss"])
        sentences.append(f"{_held_out(line)}: {loss} nats for a text token. {loss_sentence(line)}")
    line = stage.last("heldout/loss")
    if line:
        loss = _format_finite(line["heldout/loss"])
        sentences.append(
            f"{_held_out(line)}: {loss} nats for a target token of any kind, with sentinels and end tokens."
        )
    line = stage.last("heldout/token_accuracy")
    if line:
        share = _format_percent(line["heldout/token_accuracy"])
        sentences.append(
            f"{_held_out(line)}: {share} of the target tokens are the most probable ones."
        )

    for stack in ("encoder", "decoder"):
        line = stage.last(f"router/{stack}/fraction_dropped")
        if line:
            share = _format_percent(line[f"router/{stack}/fraction_dropped"])
            sentences.append(
                f"In training, at update {line['step']:,.0f}: the {stack} drops {share} of its tokens."
            )
    return sentences


def _held_out(line: Line) -> str:
    return f"Held out, after {line['step']:,.0f} updates"


def loss_sentence(line: Line) -> str:
    """Returns a held-out loss on text as a number of equally likely tokens."""
    loss = line["heldout/text_loss"]
    if not math.isfinite(loss):
        return "That is no finite number."
    text = f"That is as uncertain as a choice among {_format_choices(loss)} equally likely tokens."

    # The loss is compared with that of a model of token frequencies alone.
    entropy = line.get("heldout/unigram_entropy", math.nan)
    if not math.isfinite(entropy):
        return text
    relation = "above: they alone would predict as well or better"
    if loss < entropy:
        relation = "below: the model knows more than that"
    return (
        f"{text} Token frequencies alone need {entropy:.2f} nats (unigram entropy, {_format_choices(entropy)} tokens); "
        f"this is {abs(entropy - loss):.2f} nats {relation}."
    )


# ---------------------------------------------------------------------------
# Evaluation


def model_sentences(fingerprint: str, evaluation: Evaluation) -> list[str]:
    """Returns which models were evaluated, and whether the one of a fingerprint is among them."""
    sentences = []
    for name, evaluated in evaluation.models.items():
        relation = f"not the traced model: fingerprint {evaluated.fingerprint}"
        if evaluated.fingerprint == fingerprint:
            relation = "the traced model"
        sentences.append(f"{name} is {evaluated.folder}, {relation}.")
    if evaluation.versions:
        sentences.append(f"Evaluated with {format_versions(evaluation.versions)}.")
    return sentences


def system_comparisons(task: TaskScores) -> list[str]:
    """Returns how the first system's first metric differs from the baselines and from systems with the
    same mode of answering.
    """
    first = task.systems[0]
    ours = first.scores[0]
    sentences = []
    for other in task.systems[1:]:
        theirs = other.scores[0]
        if other.mode not in (first.mode, "baseline") or theirs.metric != ours.metric:
            continue

        # Scores without intervals cannot be compared.
        overlap = ours.overlaps(theirs)
        if overlap is None or ours.value is None or theirs.value is None:
            continue
        gap = ours.value - theirs.value
        direction = "below" if gap < 0 else "above"
        relation = "do not overlap"
        if overlap:
            relation = "overlap (`python -m eval compare` tests them in pairs)"
        sentences.append(
            f"{ours.metric}: {first.name} by {first.mode} is {abs(gap):.1f} points {direction} "
            f"{other.name} by {other.mode}; their 95 % intervals {relation}."
        )
    return sentences


# ---------------------------------------------------------------------------
# Numbers


def _format_finite(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "no number of"


def _format_percent(share: float) -> str:
    return f"{100 * share:.2f} %" if math.isfinite(share) else "no number"


def _format_choices(nats: float) -> str:
    """Returns e to the power of an entropy: the number of equally likely choices with that entropy."""
    number = math.exp(min(nats, _LARGEST_EXPONENT))
    if number < 10:
        return f"{number:,.1f}"
    return f"{number:,.0f}" if number < 1e9 else f"{number:.1g}"
