r"""stmoe inspect report: explains a model's routers on held-out examples by tables and a page.

stmoe inspect report --model runs/demo/model --pairs runs/demo/names/test.jsonl --by-prefix --out report.html \
        [--metrics sparse=runs/demo/sparse/metrics.jsonl ...] [--evaluation "Names never seen"=runs/demo/unseen ...]
stmoe inspect report --model runs/pretrain/model --corpus runs/corpus --out report.html
"""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from moe.checksums import model_fingerprint
from moe.cli import Parser, model_path
from moe.commands.routing_inputs import (
    add_inputs,
    command_text,
    describe_inputs,
    load_inspected,
    read_batches,
)
from moe.data.corpus import corpus_rows, load_corpus
from moe.errors import DataError
from moe.files import output_path
from moe.inspection.formatting import format_versions
from moe.inspection.page.evaluation_panel import read_evaluation
from moe.inspection.page.report_inputs import find_recipe, named_paths, read_stages
from moe.inspection.page.report_text import domain_sentences, tables_by_domain
from moe.inspection.page.router_report import GENERATOR, write_report
from moe.inspection.tables import (
    HEALTH_HEADER,
    balance_sentence,
    format_table,
    health_rows,
    loss_sentence,
)
from moe.parsing import printable, read_text
from moe.tracing.recorder import record_routing

_GENERATOR_TAG = f'<meta name="generator" content="{GENERATOR}">'


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe inspect report", description="Explains the routers.")
    parser.add_argument(
        "--model", type=model_path, required=True, help="folder of a model with its tokenizer"
    )
    parser.add_argument("--out", required=True, help="the .html file to write")
    add_inputs(parser)

    # Further contents of the page.
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=[],
        help="NAME=FILE for the metrics.jsonl of each run to show",
    )
    parser.add_argument(
        "--evaluation", nargs="+", default=[], help="TITLE=FOLDER of each stmoe eval run to show"
    )
    return parser


def main(argv: list[str]) -> None:
    """Traces the examples and writes the report.

    Args:
        argv: The options.
    """
    options = build_parser().parse_args(argv)

    # Reject invalid options before loading the model.
    inputs = [options.model, options.corpus, options.pairs]
    out = page_path(options.out, inputs=inputs)
    stages = read_stages(options.metrics)
    evaluations = {}
    for title, file in named_paths("--evaluation", options.evaluation).items():
        evaluations[title] = read_evaluation(file)

    inspected = load_inspected(options.model, dropless=options.dropless, hosts=False)
    trace = record_routing(inspected.model, read_batches(options, inspected))

    # The provenance of the page.
    fingerprint = model_fingerprint(options.model)
    recipe = find_recipe(options.model)
    text = describe_inputs(options, inspected)
    num_examples = f"{trace.document.numel():,} examples, {trace.encoder.ids.numel():,} encoder"
    device = f"{inspected.model.device.type} ({platform.machine()})"
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("stmoe", "torch", "transformers")}
    facts = [
        ("model", f"`{printable(options.model)}`, fingerprint {fingerprint}"),
        (
            "its recipe",
            f"`{printable(recipe)}`"
            if recipe
            else "not known: no recipe.yaml lies beside the folder of the model",
        ),
        ("text", printable(text)),
        ("traced", f"{num_examples} and {trace.decoder.ids.numel():,} decoder tokens"),
        ("loss", loss_sentence(trace)),
        ("made with", f"{format_versions(versions)}; {device}"),
        ("made by", f"`{printable(command_text('report', argv))}`"),
    ]

    write_report(
        out,
        config=inspected.model.config,
        tokenizer=inspected.tokenizer,
        trace=trace,
        folder=options.model,
        fingerprint=fingerprint,
        facts=facts,
        recipe_text=read_text(recipe) if recipe else "",
        corpus_rows=corpus_rows(load_corpus(options.corpus)) if options.corpus else (),
        stages=stages,
        evaluations=evaluations,
    )
    print(format_table(HEALTH_HEADER, health_rows(trace.layers)))
    print(balance_sentence(trace.layers))
    if len(trace.facts.domains) > 1:
        print(*domain_sentences(tables_by_domain(trace)[0]), sep="\n")
    print(f"Traced: {printable(text)}.")
    print(loss_sentence(trace))
    print(f"The report is {printable(out.resolve())}.")


def page_path(text: str, inputs: Sequence[Path | None]) -> Path:
    """Returns the path of the page.

    Raises:
        ConfigError: When it is not the path of an .html file, or is in a finished folder.
        DataError: When the file exists and is not a page of this command.
    """
    page = output_path(text, suffix=".html", inputs=inputs)

    # Only a page of this command is replaced.
    if page.exists():
        with page.open(encoding="utf-8", errors="replace") as file:
            head = file.read(1000)
        if head and _GENERATOR_TAG not in head:
            raise DataError(
                f"--out {page} exists and was not written by this command, so it is not overwritten. Choose another "
                "name, or move it away."
            )
    return page
