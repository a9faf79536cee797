"""report.html: one page, with nothing outside it, that explains what the routers of a model did on
a text.

Every sentence about a result is made from numbers of this trace, these metrics or this evaluation;
a section whose numbers were not given is not there.
"""

import math
import platform
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.data.tokenizer import SpecialIds
from moe.files import write_text
from moe.inspection import html_parts as page
from moe.inspection import plots
from moe.inspection.report_data import (
    Evaluation,
    ReadEvaluation,
    Score,
    Stage,
    SystemScores,
    TaskScores,
    TracedModel,
    TracedText,
)
from moe.inspection.tables import (
    HEALTH_HEADER,
    LEAST_SEEN,
    TokenCount,
    health_rows,
    layer_name,
    load_shares,
    routing_entropy,
    special_tokens,
    token_names,
    top_tokens,
)
from moe.inspection.trace import LayerTrace, RoutingTrace
from moe.models.configuration import STMoEConfig
from moe.parsing import read_text
from moe.sparse.stats import summarize

# Tokens of an expert that are listed; fewer when the page would be too long to be read.
_LISTED_TOKENS = 12
_FEW_TOKENS = 4
_MANY_EXPERTS = 200


def write_report(
    path: Path,
    *,
    config: STMoEConfig,
    tokenizer: PreTrainedTokenizerFast,
    trace: RoutingTrace,
    model: TracedModel,
    text: TracedText,
    command: str,
    stages: Sequence[Stage] = (),
    evaluation: ReadEvaluation | None = None,
) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: The .html file.
        config: Of the traced model, which has a sparse layer.
        tokenizer: Names the tokens.
        trace: Of held-out batches.
        model: Which model was traced.
        text: What it read.
        command: That makes this page.
        stages: Metrics of runs; may be empty.
        evaluation: Of the same or of other models; None for no section about one.
    """
    sections = [
        _headline(config, trace, model, stages, evaluation),
        _sources(model, text, command),
        _load(config, trace),
        _sentinels(tokenizer, trace),
        _experts(tokenizer, trace),
        _training(config, model, stages),
        _evaluation(model, evaluation),
        _text(text),
    ]
    write_text(
        path, page.page(f"What the routers of {printable(model.folder)} do", "".join(sections))
    )


def library_versions() -> dict[str, str]:
    """Returns the versions of Python, of this library and of what it computes with."""
    versions = {"python": platform.python_version()}
    for name in ("stmoe", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that is not installed
            versions[name] = "not installed, run from its source"
    return versions


def printable(value: Path | str) -> str:
    """Returns a path or text that can be printed: bytes that are no UTF-8 become escapes."""
    return str(value).encode(errors="backslashreplace").decode()


# ---------------------------------------------------------------------------
# What was traced


def _headline(
    config: STMoEConfig,
    trace: RoutingTrace,
    model: TracedModel,
    stages: Sequence[Stage],
    evaluation: ReadEvaluation | None,
) -> str:
    """Returns the first screen: what the model is, and its numbers."""
    summaries = [summarize(layer.stats) for layer in trace]
    num_dead = sum(summary["dead_experts"] for summary in summaries)
    num_experts = sum(layer.accepted.shape[1] for layer in trace)
    most_dropped = max(summary["fraction_dropped"] for summary in summaries)

    contents = [
        (
            f"{num_dead:.0f} of {num_experts}",
            "experts of all sparse layers are dead: no token asks for them",
        ),
        (
            f"{100 * most_dropped:.2f} %",
            "of the tokens reach no expert, in the layer where most are dropped",
        ),
    ]
    contents += [
        card for stage in stages if stage.made(model.folder) for card in _loss_cards(stage)
    ]
    for task in evaluation.content.tasks if evaluation else []:
        contents += [_score_card(task, system) for system in task.systems[:1]]

    sizes = (
        f"A sparse encoder-decoder of {config.num_parameters():,} parameters, of which one token uses "
        f"{config.num_active_parameters():,}: {config.num_layers} + {config.num_decoder_layers} blocks, "
        f"{config.num_sparse_encoder_layers} + {config.num_sparse_decoder_layers} sparse layers of "
        f"{config.num_experts} experts, at most {config.num_selected_experts} for each token; {_capacity(config)}."
    )
    return page.paragraph(sizes) + page.cards(contents)


def _loss_cards(stage: Stage) -> list[tuple[str, str]]:
    """Returns a card of the held-out loss of a run, if it measured one."""
    last = stage.last("heldout/text_loss")
    if last is None or not math.isfinite(last["heldout/text_loss"]):
        return []
    return [
        (
            f"{last['heldout/text_loss']:.2f} nats",
            f"for a held-out text token. {_explain_loss(last)}",
        )
    ]


def _score_card(task: TaskScores, system: SystemScores) -> tuple[str, str]:
    """Returns a card of one system's score on a task."""
    score = system.scores[0]
    return _score(
        score
    ), f"{score.metric} of {system.name} on {task.task}, by {system.mode} ({_interval(score)})"


def _capacity(config: STMoEConfig) -> str:
    """Returns what limits the tokens of an expert."""
    if config.expert_capacity is not None:
        return f"{config.expert_capacity} slots of an expert in each {config.capacity_scope}"
    training, evaluation = (
        "none" if factor is None else f"{factor:g}"
        for factor in (config.capacity_factor, config.eval_capacity_factor)
    )
    return f"capacity factor {training} in training and {evaluation} in evaluation"


def _sources(model: TracedModel, text: TracedText, command: str) -> str:
    """Returns from what the page was made, and by what."""
    num_examples = text.num_batches * text.batch_size
    if num_examples <= text.num_chunks:
        coverage = (
            f"{num_examples:,} of the {text.num_chunks:,} examples that this text gives, each once"
        )
    else:
        coverage = (
            f"{num_examples:,} drawn from the {text.num_chunks:,} that this text gives, each about "
            f"{num_examples / text.num_chunks:.1f} times, masked anew each time"
        )
    versions = ", ".join(f"{name} {number}" for name, number in library_versions().items())
    recipe = "not known: no recipe.yaml lies beside the folder of the model"
    if model.recipe is not None:
        recipe = page.fold(printable(model.recipe), read_text(model.recipe))

    rows = [
        ("model", f"{_code(model.folder)}, fingerprint {escape(model.fingerprint)}"),
        ("its recipe", recipe),
        (
            "text",
            f"held-out part of {_code(text.corpus)}: {text.num_documents:,} documents, {text.num_tokens:,} tokens",
        ),
        (
            "batches",
            f"{text.num_batches:,} of {text.batch_size} examples, each of {text.inputs_length} encoder and "
            f"{text.targets_length} decoder tokens: {coverage}",
        ),
        (
            "masks",
            f"span corruption, {100 * text.noise_density:g} % of the tokens in spans of {text.mean_span_length:g} on "
            f"average; seed {text.seed}",
        ),
        ("made with", f"{escape(versions)}; {escape(model.device)}"),
        ("made by", _code(command)),
    ]
    return page.section("What was traced", page.facts(rows))


# ---------------------------------------------------------------------------
# What the routers did


def _load(config: STMoEConfig, trace: RoutingTrace) -> str:
    """Returns load, entropy and drops."""
    shares = [load_shares(layer) for layer in trace]
    explain = [
        "Load is how many slots the tokens ask for at an expert, before capacity. In the map 1 x is the even load: "
        "every expert is asked as often. Blue experts are asked less, red ones more.",
        "A dead expert is asked by no token. A dropped token reached no expert, and only the residual path carries it. "
        "Load CV is the standard deviation of the load over its mean, max / mean the load of the busiest expert: 0 and "
        "1 are even.",
        "Entropy says how undecided a router is about a token, in nats, beside the largest value there is, ln E for E "
        "experts: 0 is sure of one expert, ln E prefers none; e to the power of it is among how many equal ones.",
    ]
    sentences = [_explain_layer(layer) for layer in trace]
    if config.eval_capacity_field is None:
        sentences.append("There is no capacity in evaluation, so no token can be dropped.")
    return page.section(
        "Routers",
        page.legend(explain[0])
        + page.figure(plots.plot_load([layer_name(layer) for layer in trace], shares))
        + page.table(HEALTH_HEADER, [[escape(cell) for cell in row] for row in health_rows(trace)])
        + page.listing(sentences)
        + page.legend(explain[1])
        + page.legend(explain[2]),
    )


def _explain_layer(layer: LayerTrace) -> str:
    """Returns a sentence on the load and the entropy of a layer."""
    shares = load_shares(layer)
    num_experts = len(shares)
    most = max(range(num_experts), key=lambda expert: shares[expert])
    least = min(range(num_experts), key=lambda expert: shares[expert])
    entropy = summarize(layer.stats)["entropy"]
    return (
        f"{layer_name(layer)}: expert {most + 1} is asked most, {num_experts * shares[most]:.2f} x the even load, and "
        f"expert {least + 1} least, {num_experts * shares[least]:.2f} x. On average the router is as undecided "
        f"about a token as between {math.exp(entropy):.1f} equally good experts of {num_experts} ({entropy:.2f} nats)."
    )


def _sentinels(tokenizer: PreTrainedTokenizerFast, trace: RoutingTrace) -> str:
    """Returns over how many experts sentinels spread, beside text."""
    rows = []
    for layer in trace:
        row = [layer_name(layer)]
        for group in _sentinels_and_text(tokenizer, layer.first_choice):
            row += _spread(layer.first_choice, group)
        row.append(f"{plots.even_entropy(layer.first_choice.shape[1]):.2f}")
        rows.append(row)
    header = [
        "sparse layer",
        "sentinels",
        "entropy",
        "experts",
        "text tokens",
        "entropy",
        "experts",
        "ln E",
    ]
    return page.section(
        "Sentinels",
        page.legend(
            "The first choices of all sentinels, and of all text tokens: how many there are, the entropy in nats of "
            "the experts' shares in them, and e to the power of it, the experts they are spread over as if evenly. At "
            "ln E all experts share alike; the fewer experts, the more these are experts for sentinels. After ST-MoE "
            "(arXiv:2202.08906), Table 14."
        )
        + page.table(header, rows),
    )


def _sentinels_and_text(
    tokenizer: PreTrainedTokenizerFast, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns which of the tokens of <int64>[V, E] are sentinels, and which are text, <bool>[V]."""
    ids = SpecialIds.of(tokenizer)
    lowest = ids.first_sentinel - ids.num_sentinels + 1
    number = torch.arange(len(counts), device=counts.device)
    sentinel = (number >= lowest) & (number <= ids.first_sentinel)
    text = (number < lowest) & (number != ids.eos) & (number != ids.pad)
    return sentinel, text


def _spread(counts: Tensor, group: Tensor) -> list[str]:
    """Returns how often a class of tokens was seen, the entropy of its experts, and the experts
    that it makes.
    """
    seen = int(counts[group].sum())
    if not seen:
        return ["0", "-", "-"]
    entropy = routing_entropy(counts, group)
    return [f"{seen:,}", f"{entropy:.2f}", f"{math.exp(entropy):.1f}"]


def _experts(tokenizer: PreTrainedTokenizerFast, trace: RoutingTrace) -> str:
    """Returns for each expert of each layer the tokens that it receives most."""
    num_experts = sum(layer.first_choice.shape[1] for layer in trace)
    number = _LISTED_TOKENS if num_experts <= _MANY_EXPERTS else _FEW_TOKENS
    parts = [
        page.legend(
            "First choices. Beside a token: in how many of its occurrences this expert was its first choice, which is "
            "also how far its box is filled. Lift (x) is that share over the expert's share of all tokens, smoothed as "
            "if the token had been seen 20 times more, routed as all are: 1 x is no preference, a rare token needs "
            f"more evidence, and one seen less than {LEAST_SEEN} times is not listed there. A word begins with ▁; "
            "<start> is what the decoder begins with."
        )
    ]
    for layer in trace:
        counts = layer.first_choice
        num_tokens = int(counts.sum())
        rows = []
        for expert in range(counts.shape[1]):
            chosen = int(counts[:, expert].sum())
            rows.append(
                [
                    str(expert + 1),
                    f"{100 * chosen / max(1, num_tokens):.1f} %",
                    _tokens(
                        tokenizer, layer, top_tokens(counts, expert, number=number), lift=False
                    ),
                    _tokens(
                        tokenizer, layer, special_tokens(counts, expert, number=number), lift=True
                    ),
                ]
            )
        parts.append(page.heading(f"{layer_name(layer)}: {num_tokens:,} tokens"))
        parts.append(
            page.table(["expert", "first choice of", "receives most", "prefers, by lift"], rows)
        )
    return page.section("Tokens by expert", "".join(parts))


def _tokens(
    tokenizer: PreTrainedTokenizerFast,
    layer: LayerTrace,
    counts: Sequence[TokenCount],
    *,
    lift: bool,
) -> str:
    """Returns tokens as HTML, each with its counts and with its lift if wanted."""
    names = token_names(tokenizer, layer, [count.token for count in counts])
    parts = []
    for name, count in zip(names, counts, strict=True):
        words = f"{count.occurrences:,}/{count.seen:,}" + (f" · {count.lift:.1f} x" if lift else "")
        tooltip = f"{count.occurrences:,} of its {count.seen:,} occurrences; lift {count.lift:.2f}"
        parts.append(page.token(name, words, tooltip, count.occurrences / count.seen))
    return " ".join(parts) or "-"


# ---------------------------------------------------------------------------
# How it was trained


def _training(config: STMoEConfig, model: TracedModel, stages: Sequence[Stage]) -> str:
    """Returns the curves of each run, and what its last line says."""
    parts = []
    for stage in stages:
        own = stage.made(model.folder)
        parts.append(
            page.heading(f"{stage.name}: the run of the traced model" if own else stage.name)
        )
        parts.append(f"<p>{_code(stage.path)}</p>")
        parts.append(page.listing(_explain_run(stage)))
        if plots.has_curves(stage.lines):
            parts.append(
                page.figure(plots.plot_training(stage.lines, config.num_experts if own else None))
            )

    with_accuracy = [stage for stage in stages if stage.last("heldout/token_accuracy")]
    if len(with_accuracy) > 1:
        parts.append(page.heading("Target tokens right"))
        parts.append(
            page.legend(
                "Each run on its own held-out data, so curves compare where that is the same."
            )
        )
        parts.append(page.figure(plots.plot_accuracy(with_accuracy)))
    return page.section("Training", "".join(parts)) if parts else ""


def _explain_run(stage: Stage) -> list[str]:
    """Returns sentences on the last measurements of a run."""
    sentences = []
    if last := stage.last("heldout/text_loss"):
        sentences.append(
            f"Held out, after {last['step']:,.0f} updates: {_number(last['heldout/text_loss'])} nats for a text token. "
            f"{_explain_loss(last)}"
        )
    if last := stage.last("heldout/loss"):
        sentences.append(
            f"Held out, after {last['step']:,.0f} updates: {_number(last['heldout/loss'])} nats for a target token of "
            "any kind, with sentinels and end tokens."
        )
    if last := stage.last("heldout/token_accuracy"):
        sentences.append(
            f"Held out, after {last['step']:,.0f} updates: {_percent(last['heldout/token_accuracy'])} of the target "
            "tokens are the most probable ones."
        )
    for stack in ("encoder", "decoder"):
        if last := stage.last(f"router/{stack}/fraction_dropped"):
            share = _percent(last[f"router/{stack}/fraction_dropped"])
            sentences.append(
                f"In training, at update {last['step']:,.0f}: the {stack} drops {share} of its tokens."
            )
    return sentences


def _explain_loss(line: dict[str, float]) -> str:
    """Returns what a held-out loss on text means, in numbers of equally likely tokens."""
    loss = line["heldout/text_loss"]
    if not math.isfinite(loss):
        return "That is no finite number."
    text = f"That is as uncertain as a choice among {_choices(loss)} equally likely tokens."

    entropy = line.get("heldout/unigram_entropy", math.nan)
    if not math.isfinite(entropy):
        return text
    gap = entropy - loss
    relation = (
        "below: the model knows more than that"
        if gap > 0
        else "above: they alone would predict as well or better"
    )
    return (
        f"{text} Who knows only how frequent each token is needs {entropy:.2f} nats (unigram entropy, "
        f"{_choices(entropy)} tokens); this is {abs(gap):.2f} nats {relation}."
    )


# ---------------------------------------------------------------------------
# How well it answers


def _evaluation(model: TracedModel, evaluation: ReadEvaluation | None) -> str:
    """Returns the scores of all systems, and how their intervals lie."""
    if evaluation is None:
        return ""
    content = evaluation.content
    parts = [f"<p>{_code(evaluation.path)}</p>", page.listing(_explain_models(model, content))]
    for task in content.tasks:
        rows = []
        for system in task.systems:
            for score in system.scores:
                cells = (system.name, system.mode, score.metric, _score(score), _interval(score))
                rows.append([escape(cell) for cell in cells])
        examples = f"{task.num_examples:,} examples of the {task.split} split in {task.num_groups:,} groups."
        parts.append(page.heading(task.task))
        parts.append(page.paragraph(f"{task.description} {examples}"))
        parts.append(page.table(["system", "mode", "metric", "score", "95 % interval"], rows))
        parts.append(page.listing(_compare_systems(task)))
    parts.append(
        page.listing([f"{failure.task} failed: {failure.message}" for failure in content.failed])
    )
    return page.section("Evaluation", "".join(parts))


def _explain_models(model: TracedModel, content: Evaluation) -> list[str]:
    """Returns which models were evaluated, and whether the traced one is among them."""
    sentences = []
    for name, evaluated in content.models.items():
        same = evaluated.fingerprint == model.fingerprint
        relation = (
            "the traced model"
            if same
            else f"not the traced model: fingerprint {evaluated.fingerprint}"
        )
        sentences.append(f"{name} is {evaluated.folder}, {relation}.")
    if content.versions:
        sentences.append(
            "Evaluated with "
            + ", ".join(f"{n} {number}" for n, number in content.versions.items())
            + "."
        )
    return sentences


def _compare_systems(task: TaskScores) -> list[str]:
    """Returns a sentence for each system that answered as the first one did, and for each baseline,
    by first metric.
    """
    if not task.systems:
        return []
    first = task.systems[0]
    ours = first.scores[0]
    sentences = []
    for other in task.systems[1:]:
        theirs = other.scores[0]
        if other.mode not in (first.mode, "baseline") or theirs.metric != ours.metric:
            continue
        overlap = ours.overlaps(theirs)
        if overlap is None or ours.value is None or theirs.value is None:
            continue
        gap = ours.value - theirs.value
        relation = (
            "overlap (`python -m eval compare` tests them in pairs)"
            if overlap
            else "do not overlap"
        )
        sentences.append(
            f"{ours.metric}: {first.name} by {first.mode} is {abs(gap):.1f} points {'below' if gap < 0 else 'above'} "
            f"{other.name} by {other.mode}; their 95 % intervals {relation}."
        )
    return sentences


def _text(text: TracedText) -> str:
    """Returns counts and licences of the corpus."""
    return page.section("Text", f'<div class="scroll"><pre>{escape(text.table)}</pre></div>')


# ---------------------------------------------------------------------------
# Numbers as text


def _score(score: Score) -> str:
    """Returns a score in 0..100; `-` when there is none."""
    return "-" if score.value is None else f"{score.value:.1f}"


def _interval(score: Score) -> str:
    """Returns e.g. `76.3 to 84.3`; `-` when there is no interval."""
    return (
        "-" if score.low is None or score.high is None else f"{score.low:.1f} to {score.high:.1f}"
    )


def _number(value: float) -> str:
    """Returns a number, or that it is none."""
    return f"{value:.2f}" if math.isfinite(value) else "no number of"


def _percent(share: float) -> str:
    """Returns a share in percent, or that it is none."""
    return f"{100 * share:.2f} %" if math.isfinite(share) else "no number"


def _choices(nats: float) -> str:
    """Returns e to the power of an entropy: how many equally likely choices it stands for."""
    number = math.exp(min(nats, 700.0))
    return (
        f"{number:,.1f}" if number < 10 else f"{number:,.0f}" if number < 1e9 else f"{number:.1g}"
    )


def _code(value: Path | str) -> str:
    """Returns a path or command as HTML."""
    return f"<code>{escape(printable(value))}</code>"
