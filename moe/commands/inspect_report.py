r"""stmoe inspect report: explains a model's routers on held-out examples by tables and a page.

stmoe inspect report --model runs/demo/model --pairs runs/demo/names/test.jsonl --by-prefix --out report.html
stmoe inspect report --model runs/pretrain/model --corpus runs/corpus --out report.html
"""

import platform
from importlib.metadata import version

from moe.checksums import model_fingerprint
from moe.cli import Parser
from moe.commands.routing_inputs import (
    add_inputs,
    command_text,
    describe_inputs,
    load_inspected,
    read_batches,
)
from moe.files import output_path
from moe.inspection.formatting import format_versions
from moe.inspection.page.report_text import domain_sentences, tables_by_domain
from moe.inspection.page.router_report import write_report
from moe.inspection.tables import health_text, loss_sentence
from moe.parsing import printable
from moe.tracing.recorder import record_routing


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe inspect report", description="Explains the routers.")
    parser.add_argument("--out", required=True, help="the .html file to write")
    add_inputs(parser)
    return parser


def main(argv: list[str]) -> None:
    """Traces the examples and writes the report.

    Args:
        argv: The options.
    """
    options = build_parser().parse_args(argv)

    # Reject invalid options before loading the model.
    inputs = [options.model, options.corpus, options.pairs]
    out = output_path(options.out, suffix=".html", inputs=inputs)
    inspected = load_inspected(options.model, dropless=options.dropless, hosts=False)
    trace = record_routing(inspected.model, read_batches(options, inspected))

    # The provenance of the page.
    text = describe_inputs(options, inspected)
    num_examples = f"{trace.document.numel():,} examples, {trace.encoder.ids.numel():,} encoder"
    device = f"{inspected.model.device.type} ({platform.machine()})"
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("stmoe", "torch", "transformers")}
    facts = [
        ("model", f"`{printable(options.model)}`, fingerprint {model_fingerprint(options.model)}"),
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
        facts=facts,
    )
    print(health_text(trace.layers))
    if len(trace.facts.domains) > 1:
        print(*domain_sentences(tables_by_domain(trace)[0]), sep="\n")
    print(f"Traced: {printable(text)}.")
    print(loss_sentence(trace))
    print(f"The report is {printable(out.resolve())}.")
