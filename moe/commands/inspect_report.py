r"""stmoe inspect report: explains a model's routers on held-out text, by tables and a page.

stmoe inspect report --model runs/demo/pretrain/model --corpus runs/demo/corpus --out report.html \
        [--metrics pretrain=runs/demo/pretrain/metrics.jsonl ...] \
        [--evaluation runs/demo/eval/report.json]
"""

import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from moe.checks import check_integer
from moe.checksums import model_fingerprint
from moe.cli import Parser, integer, path
from moe.commands.routing_inputs import add_noise_density, command_text, load_inspected
from moe.data.corpus import Corpus, corpus_table, load_corpus
from moe.data.pipeline import SpanCorruptionSource
from moe.data.tokenizer import SpecialIds
from moe.data.tokens import tokenize_corpus
from moe.errors import DataError
from moe.files import output_path
from moe.inspection.report.report import GENERATOR, write_report
from moe.inspection.report.report_data import (
    TracedModel,
    TracedText,
    find_recipe,
    read_evaluation,
    read_stages,
)
from moe.inspection.tables import HEALTH_HEADER, format_table, health_rows, loss_sentence
from moe.inspection.token_counts import count_tokens
from moe.models.modeling import STMoEForConditionalGeneration
from moe.opening import open_to_read
from moe.parsing import printable
from moe.tracing.examples import describe_noise, pretraining_noise
from moe.tracing.recorder import record_routing, traced_batches

_BATCH_SIZE = 64
_SEED = 0
_MAX_BATCHES = 100_000
_GENERATOR_TAG = f'<meta name="generator" content="{GENERATOR}">'
# What a page of an earlier version has in the place of this tag.
_EARLIER_TITLE = "<title>What the model learned, and what its routers do</title>"


def build_parser() -> Parser:
    """Returns what reads the command line."""
    parser = Parser(prog="stmoe inspect report", description="Explains the routers.")
    explanation = "folder of a model with its tokenizer"
    parser.add_argument("--model", type=path, required=True, help=explanation)
    explanation = "folder made by stmoe corpus"
    parser.add_argument("--corpus", type=path, required=True, help=explanation)
    parser.add_argument("--out", required=True, help="the .html file to write")

    # Further contents of the page.
    explanation = "NAME=FILE for the metrics.jsonl of each run to show"
    parser.add_argument("--metrics", nargs="+", default=[], help=explanation)
    explanation = "report.json of python -m eval run"
    parser.add_argument("--evaluation", type=path, help=explanation)

    # How much text is traced.
    batches = integer(least=1, most=_MAX_BATCHES, reason="more change nothing that is seen")
    explanation = f"batches of {_BATCH_SIZE} examples to trace (16)"
    parser.add_argument("--batches", type=batches, default=16, help=explanation)
    explanation = "encoder tokens of an example (64)"
    parser.add_argument("--inputs-length", type=integer(least=4), default=64, help=explanation)
    add_noise_density(parser)
    return parser


def main(argv: list[str]) -> None:
    """Traces held-out text and writes the report."""
    options = build_parser().parse_args(argv)

    # What can be refused before a model is loaded.
    out = page_path(options.out, inputs=[options.model, options.corpus, options.evaluation])
    stages = read_stages(options.metrics)
    evaluation = None
    if options.evaluation is not None:
        evaluation = read_evaluation(options.evaluation)

    # What is traced, and on what.
    _, model, tokenizer = load_inspected(options.model)
    corpus = load_corpus(options.corpus)
    tokens = held_out_tokens(corpus, tokenizer, options.inputs_length)
    noise = pretraining_noise(model.config, options.noise_density)
    source = SpanCorruptionSource(
        tokens,
        SpecialIds.of(tokenizer),
        inputs_length=options.inputs_length,
        batch_size=_BATCH_SIZE,
        seed=_SEED,
        noise=noise,
    )
    batches = map(source.batch, range(options.batches))
    trace = record_routing(model, traced_batches(batches))
    counts = count_tokens(trace, model.config.vocab_size)
    inputs_length, targets_length = source.lengths
    text = TracedText(
        corpus=options.corpus,
        table=corpus_table(corpus),
        num_documents=len(corpus.held_out),
        num_tokens=tokens.size,
        num_chunks=source.num_examples,
        num_batches=options.batches,
        batch_size=_BATCH_SIZE,
        inputs_length=inputs_length,
        targets_length=targets_length,
        masks=f"{describe_noise(noise, model.config)}; seed {_SEED}",
        loss=loss_sentence(trace),
    )

    write_report(
        out,
        config=model.config,
        tokenizer=tokenizer,
        counts=counts,
        model=describe_model(options.model, model),
        text=text,
        command=command_text("report", argv),
        stages=stages,
        evaluation=evaluation,
    )
    print(format_table(HEALTH_HEADER, health_rows(counts)))
    print(f"Traced: {text.masks}.")
    print(text.loss)
    print(f"The report is {printable(out.resolve())}.")


def describe_model(folder: Path, model: STMoEForConditionalGeneration) -> TracedModel:
    """Returns what the page says of the model."""
    return TracedModel(
        folder=folder,
        fingerprint=model_fingerprint(folder),
        device=f"{model.device.type} ({platform.machine()})",
        recipe=find_recipe(folder),
    )


def page_path(text: str, inputs: Sequence[Path | None]) -> Path:
    """Returns where the page goes.

    Raises:
        ConfigError: When it is no path of an .html file, or it would be mixed with a model or what
            else is finished.
        DataError: When something else than a page of this command lies there.
    """
    page = output_path(text, suffix=".html", inputs=inputs)

    # Only a page of this command is replaced.
    if page.exists():
        with open(page, encoding="utf-8", errors="replace", opener=open_to_read) as file:
            head = file.read(1000)
        if head and _GENERATOR_TAG not in head and _EARLIER_TITLE not in head:
            raise DataError(
                f"--out {page} exists and is no page of this command, so it is not overwritten. "
                "Choose another name, or move it away."
            )
    return page


def held_out_tokens(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, inputs_length: int
) -> NDArray[np.int32]:
    """Returns <int32>[N] the tokens of a corpus' held-out text.

    Raises:
        ConfigError: When an example would be longer than the text.
    """
    tokens = tokenize_corpus(corpus.held_out, tokenizer)
    reason = "the held-out text has so many tokens"
    check_integer("--inputs-length", inputs_length, least=4, most=tokens.size, reason=reason)
    return tokens
