r"""stmoe inspect report: explains a model's routers on held-out text by tables and a page.

stmoe inspect report --model runs/demo/pretrain/model --corpus runs/demo/corpus --out report.html \
        [--metrics pretrain=runs/demo/pretrain/metrics.jsonl ...] \
        [--evaluation runs/demo/eval/report.json] [--summary runs/demo/summary.json]
"""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moe.checks import check_integer
from moe.checksums import model_fingerprint
from moe.cli import Parser, integer, model_path, path
from moe.commands.routing_inputs import add_noise_density, command_text, load_inspected
from moe.data.corpus import corpus_rows, load_corpus
from moe.data.pipeline import SpanCorruptionSource
from moe.data.tokenizer import SpecialIds
from moe.data.tokens import tokenize_corpus
from moe.errors import DataError
from moe.files import output_path
from moe.inspection.formatting import format_versions
from moe.inspection.page.report_inputs import (
    find_recipe,
    read_evaluation,
    read_stages,
    read_summary,
)
from moe.inspection.page.report_text import batches_sentence
from moe.inspection.page.router_report import GENERATOR, write_report
from moe.inspection.tables import (
    HEALTH_HEADER,
    balance_sentence,
    count_tokens,
    format_table,
    health_rows,
    loss_sentence,
)
from moe.opening import open_to_read
from moe.parsing import printable, read_text
from moe.tracing.examples import describe_noise, pretraining_noise
from moe.tracing.recorder import record_routing, traced_batches

_BATCH_SIZE = 64
_SEED = 0
_MAX_BATCHES = 100_000
_GENERATOR_TAG = f'<meta name="generator" content="{GENERATOR}">'


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe inspect report", description="Explains the routers.")
    parser.add_argument(
        "--model", type=model_path, required=True, help="folder of a model with its tokenizer"
    )
    parser.add_argument("--corpus", type=path, required=True, help="folder made by stmoe corpus")
    parser.add_argument("--out", required=True, help="the .html file to write")

    # Further contents of the page.
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=[],
        help="NAME=FILE for the metrics.jsonl of each run to show",
    )
    parser.add_argument("--evaluation", type=path, help="report.json of python -m eval run")
    parser.add_argument(
        "--summary", type=path, help="JSON file of sentences and bars (%%) that open the page"
    )

    # Amount of text to trace.
    batches = integer(least=1, most=_MAX_BATCHES, reason="more change nothing that is seen")
    parser.add_argument(
        "--batches",
        type=batches,
        default=16,
        help=f"batches of {_BATCH_SIZE} examples to trace (16)",
    )
    parser.add_argument(
        "--inputs-length",
        type=integer(least=4),
        default=64,
        help="encoder tokens of an example (64)",
    )
    add_noise_density(parser)
    return parser


def main(argv: list[str]) -> None:
    """Traces held-out text and writes the report."""
    options = build_parser().parse_args(argv)

    # Reject invalid options before loading the model.
    out = page_path(
        options.out, inputs=[options.model, options.corpus, options.evaluation, options.summary]
    )
    stages = read_stages(options.metrics)
    evaluation = None if options.evaluation is None else read_evaluation(options.evaluation)
    summary = None if options.summary is None else read_summary(options.summary)

    # The model, and the held-out text of the corpus.
    _, model, tokenizer = load_inspected(options.model, hosts=False)
    corpus = load_corpus(options.corpus)
    tokens = tokenize_corpus(corpus.held_out, tokenizer)
    check_integer(
        "--inputs-length",
        options.inputs_length,
        least=4,
        most=tokens.size,
        reason="the held-out text has so many tokens",
    )
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

    # The provenance of the page.
    masks = f"{describe_noise(noise, model.config)}; seed {_SEED}"
    fingerprint = model_fingerprint(options.model)
    recipe = find_recipe(options.model)
    corpus_size = f"{len(corpus.held_out):,} documents, {tokens.size:,} tokens"
    device = f"{model.device.type} ({platform.machine()})"
    facts = [
        ("model", f"`{printable(options.model)}`, fingerprint {fingerprint}"),
        (
            "its recipe",
            f"`{printable(recipe)}`"
            if recipe
            else "not known: no recipe.yaml lies beside the folder of the model",
        ),
        ("text", f"held-out part of `{printable(options.corpus)}`: {corpus_size}"),
        ("batches", batches_sentence(source, options.batches)),
        ("masks", masks),
        ("loss", loss_sentence(trace)),
        ("made with", f"{format_versions(library_versions())}; {device}"),
        ("made by", f"`{printable(command_text('report', argv))}`"),
    ]
    if options.evaluation is not None:
        facts.append(("evaluation", f"`{printable(options.evaluation)}`"))

    write_report(
        out,
        config=model.config,
        tokenizer=tokenizer,
        counts=counts,
        folder=options.model,
        fingerprint=fingerprint,
        facts=facts,
        recipe_text=read_text(recipe) if recipe else "",
        corpus_rows=corpus_rows(corpus),
        stages=stages,
        evaluation=evaluation,
        summary=summary,
    )
    print(format_table(HEALTH_HEADER, health_rows(counts)))
    print(balance_sentence(counts))
    print(f"Traced: {masks}.")
    print(loss_sentence(trace))
    print(f"The report is {printable(out.resolve())}.")


def library_versions() -> dict[str, str]:
    """Returns the versions of Python, this library, torch and transformers."""
    versions = {"python": platform.python_version()}
    for name in ("stmoe", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that is not installed
            versions[name] = "not installed, run from its source"
    return versions


def page_path(text: str, inputs: Sequence[Path | None]) -> Path:
    """Returns the path of the page.

    Raises:
        ConfigError: When it is not the path of an .html file, or is in a finished folder.
        DataError: When the file exists and is not a page of this command.
    """
    page = output_path(text, suffix=".html", inputs=inputs)

    # Only a page of this command is replaced.
    if page.exists():
        with open(page, encoding="utf-8", errors="replace", opener=open_to_read) as file:
            head = file.read(1000)
        if head and _GENERATOR_TAG not in head:
            raise DataError(
                f"--out {page} exists and was not written by this command, so it is not overwritten. Choose another "
                "name, or move it away."
            )
    return page
