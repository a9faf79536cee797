"""report.html: one page, with nothing outside it, that explains a run."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from moe.data.tokenizer import SpecialIds
from moe.files import whole_file
from moe.inspection import plots
from moe.inspection.tables import (
    HEALTH_HEADER,
    TokenCount,
    health_rows,
    layer_name,
    load_shares,
    routing_entropy,
    special_tokens,
    top_tokens,
)
from moe.inspection.trace import RoutingTrace
from moe.models.configuration import STMoEConfig

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fdfdfc; --line: #d8d8d4; --soft: #5b5b57; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e4; --paper: #1a1a1c; --line: #3a3a3d; --soft: #a5a5a0; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
p.read { color: var(--soft); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; } th, td { text-align: left; padding: .2rem .8rem .2rem 0;
       border-bottom: 1px solid var(--line); vertical-align: top; } code { font-size: .92em; }
figure { margin: .8rem 0; background: #fff; border-radius: 6px; padding: .4rem; }
figure svg { width: 100%; height: auto; display: block; }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; } .card { border: 1px solid var(--line); border-radius: 6px;
       padding: .6rem 1rem; } .card b { font-size: 1.5rem; display: block; } td code { white-space: nowrap; }
"""


def write_report(
    path: Path,
    *,
    config: STMoEConfig,
    tokenizer: PreTrainedTokenizerFast,
    trace: RoutingTrace,
    stages: dict[str, list[dict[str, Any]]],
    evaluation: dict[str, Any] | None = None,
    corpus_table: str | None = None,
) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: The .html file.
        config: Of the traced model.
        tokenizer: Names the tokens.
        trace: Of held-out batches.
        stages: Lines of metrics by stage; the first is pre-training, the others fine-tuning. May be empty.
        evaluation: Content of report.json of `python -m eval run`; None leaves its section empty.
        corpus_table: Counts and licences of the text.
    """
    sections = [
        _headline(config, stages, evaluation),
        _training(stages),
        _router(config, stages, trace),
        _sentinels(tokenizer, trace),
        _experts(tokenizer, trace),
        _evaluation(evaluation),
        _corpus(corpus_table),
    ]
    title = "What the model learned, and what its routers do"
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>{''.join(sections)}</body></html>\n"
    )
    with whole_file(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _headline(config: STMoEConfig, stages: dict[str, Any], evaluation: dict[str, Any] | None) -> str:
    """Returns the first screen: what the model is, and its numbers."""
    cards = []
    final = _last(next(iter(stages.values()), []), "heldout/text_loss")
    if final:
        gap = final["heldout/unigram_entropy"] - final["heldout/text_loss"]
        text = f"held-out loss on text: {final['heldout/text_loss']:.2f} nats, {gap:.2f} below its unigram entropy"
        cards.append((f"{gap:.2f} nats", text))
    for task in (evaluation or {}).get("tasks", []):
        for row in task["systems"][:1]:
            score = row["scores"][0]
            text = f"{task['task']}, {score['metric']} of {row['name']} by {row['mode']} ({_interval(score)})"
            cards.append((_score(score), text))
    body = "".join(f'<div class="card"><b>{escape(big)}</b>{escape(small)}</div>' for big, small in cards)
    return (
        f"<p>A sparse encoder-decoder of {config.num_parameters():,} parameters, of which one token uses "
        f"{config.num_active_parameters():,}: {config.num_layers} + {config.num_decoder_layers} blocks, "
        f"{config.num_sparse_encoder_layers} + {config.num_sparse_decoder_layers} sparse layers of "
        f"{config.num_experts} experts, {config.num_selected_experts} for each token; {_capacity(config)}.</p>"
        f'<div class="cards">{body}</div>'
    )


def _capacity(config: STMoEConfig) -> str:
    """Returns what limits the tokens of an expert."""
    if config.expert_capacity is not None:
        return f"{config.expert_capacity} slots of an expert in each {config.capacity_scope}"
    return f"capacity factor {config.capacity_factor} in training and {config.eval_capacity_factor} in evaluation"


def _training(stages: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the loss curves."""
    if not stages:
        return _section("Training", "<p>No metrics were given.</p>")
    names = list(stages)
    parts = [
        _read(
            "Sentinels and the end token are easy, so the loss on text tokens is the honest one. Below the dashed "
            "line, the model knows more than how frequent each token is."
        ),
        _figure(plots.plot_pretraining(stages[names[0]])),
    ]
    if names[1:]:
        parts.append(_read("Fine-tuning, measured on validation data: the share of target tokens that are right."))
        parts.append(_figure(plots.plot_finetuning({name: stages[name] for name in names[1:]})))
    return _section("Training", "".join(parts))


def _router(config: STMoEConfig, stages: dict[str, list[dict[str, Any]]], trace: RoutingTrace) -> str:
    """Returns load, entropy and drops."""
    shares = [load_shares(layer) for layer in trace]
    parts = [
        _read(f"Each expert's share of the load on held-out text; {100 / config.num_experts:.1f} % is even."),
        _figure(plots.plot_load([layer_name(layer) for layer in trace], shares)),
        _table(HEALTH_HEADER, [[escape(cell) for cell in row] for row in health_rows(trace)]),
        _read(
            "A dead expert gets no token. A dropped token reached no expert, and only the residual path carries it. "
            "Load CV is the standard deviation of the load over its mean: 0 is even."
        ),
    ]
    for lines in list(stages.values())[:1]:
        even = plots.even_entropy(config.num_experts)
        parts += [
            _read("Router entropy: low means decided, the dashed line means that no expert is preferred."),
            _figure(plots.plot_router(lines, "entropy", "entropy (nats)", bound=(even, f"ln E = {even:.2f}"))),
            _read("Fraction of training tokens that reached no expert because its slots were taken."),
            _figure(plots.plot_router(lines, "fraction_dropped", "fraction dropped")),
        ]
    return _section("Routers", "".join(parts))


def _sentinels(tokenizer: PreTrainedTokenizerFast, trace: RoutingTrace) -> str:
    """Returns how decided the routing of sentinels is, beside that of text."""
    ids = SpecialIds.of(tokenizer)
    rows = []
    for layer in trace:
        vocab_size, num_experts = layer.first_choice.shape
        number = layer.first_choice.new_tensor(range(vocab_size))
        sentinel = (number > ids.first_sentinel - ids.num_sentinels) & (number <= ids.first_sentinel)
        text = (number <= ids.first_sentinel - ids.num_sentinels) & (number != ids.eos) & (number != ids.pad)
        entropies = (routing_entropy(layer.first_choice, group) for group in (sentinel, text))
        rows.append(
            [layer_name(layer), *(f"{value:.2f}" for value in entropies), f"{plots.even_entropy(num_experts):.2f}"]
        )
    return _section(
        "Sentinels",
        _read(
            "Entropy in nats of the experts that sentinels and text tokens go to. The paper finds sentinel experts "
            "in the encoder (entropy well below ln E) and none in the decoder."
        )
        + _table(["sparse layer", "sentinels", "text", "ln E"], rows),
    )


def _experts(tokenizer: PreTrainedTokenizerFast, trace: RoutingTrace) -> str:
    """Returns for each expert of each layer the tokens that it receives most."""
    parts = [
        _read(
            "First choices on held-out text. Lift compares an expert's share of a token with its share of all tokens; "
            "1 is no preference."
        )
    ]
    for layer in trace:
        rows = []
        for expert in range(layer.first_choice.shape[1]):
            most = top_tokens(layer.first_choice, expert)
            special = special_tokens(layer.first_choice, expert)
            share = 100 * load_shares(layer)[expert]
            rows.append(
                [str(expert + 1), f"{share:.1f} %", _tokens(tokenizer, most), _tokens(tokenizer, special, lift=True)]
            )
        parts.append(f"<h3>{escape(layer_name(layer))}</h3>")
        parts.append(_table(["expert", "load", "most frequent", "beyond its share (lift)"], rows))
    return _section("Tokens by expert", "".join(parts))


def _evaluation(evaluation: dict[str, Any] | None) -> str:
    """Returns the scores of all systems."""
    if not evaluation:
        return _section("Evaluation", "<p>No evaluation was given.</p>")
    parts = []
    for task in evaluation["tasks"]:
        rows = [
            [escape(text) for text in (row["name"], row["mode"], score["metric"], _score(score), _interval(score))]
            for row in task["systems"]
            for score in row["scores"]
        ]
        parts.append(f"<h3>{escape(task['task'])}</h3><p>{escape(task['description'])}</p>")
        parts.append(_table(["system", "mode", "metric", "score", "95 % interval"], rows))
    parts.append(
        _read(
            "At this size pre-training brings no gain; the model from scratch stands here so that nobody "
            "claims one. Overlapping intervals show no difference."
        )
    )
    return _section("Evaluation", "".join(parts))


def _corpus(table: str | None) -> str:
    """Returns counts and licences of the text."""
    body = f'<div class="scroll"><pre>{escape(table)}</pre></div>' if table else "<p>No corpus was given.</p>"
    return _section("Text", body)


def _last(lines: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Returns the last line that holds a metric."""
    return next((line for line in reversed(lines) if name in line), None)


def _score(score: dict[str, Any]) -> str:
    """Returns a score in 0..100; `-` when there is none."""
    return "-" if score["value"] is None else f"{score['value']:.1f}"


def _interval(score: dict[str, Any]) -> str:
    """Returns e.g. `76.3 to 84.3`; `-` when there is no interval."""
    return "-" if score["low"] is None else f"{score['low']:.1f} to {score['high']:.1f}"


def _tokens(tokenizer: PreTrainedTokenizerFast, counts: Sequence[TokenCount], *, lift: bool = False) -> str:
    """Returns tokens as HTML, with their lift or count as a tooltip and, for lift, in brackets."""
    names = tokenizer.convert_ids_to_tokens([count.token for count in counts])
    return " ".join(
        f'<code title="{count.occurrences} times, lift {count.lift:.1f}">{escape(str(name))}</code>'
        + (f" ({count.lift:.1f})" if lift else "")
        for name, count in zip(names, counts, strict=True)
    )


def _section(title: str, body: str) -> str:
    """Returns a section with its heading."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _read(text: str) -> str:
    """Returns a sentence on how to read what follows."""
    return f'<p class="read">{escape(text)}</p>'


def _figure(svg: str) -> str:
    """Returns a figure."""
    return f"<figure>{svg}</figure>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table; the cells are HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
