r"""stmoe inspect view: an interactive page on a trace, and its tables.

stmoe inspect view --trace runs/trace --out runs/view.html
stmoe inspect view --trace runs/trace --ablation runs/ablation.json --out runs/view.html
"""

from moe.cli import Parser, model_path, path
from moe.commands.routing_inputs import add_trace, load_traced
from moe.files import output_path
from moe.inspection.page.panel_data import LayerClasses, read_ablation, view_classes
from moe.inspection.page.routing_view import routing_view
from moe.inspection.statistics.permutations import LEAST_DOCUMENTS
from moe.inspection.statistics.routing_entropy import sentinel_entropies, sentinel_table
from moe.inspection.tables import format_table, loss_sentence
from moe.parsing import printable
from moe.tracing.trace import Trace, layer_name
from moe.tracing.trace_file import read_trace

CLASS_HEADER = ["sparse layer", "class", "tokens", "expert", "of the class", "lift", "p"]
_LEVEL = 0.05


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe inspect view", description="Shows a trace as a page.")
    add_trace(parser)
    parser.add_argument(
        "--model", type=model_path, help="folder of the traced model (where it was)"
    )
    parser.add_argument("--out", required=True, help="the .html file to write")
    parser.add_argument("--ablation", type=path, help="file made by stmoe inspect ablate")
    return parser


def main(argv: list[str]) -> None:
    """Writes the page, and prints the tables."""
    options = build_parser().parse_args(argv)
    inputs = [options.trace, options.model, options.ablation]
    out = output_path(options.out, suffix=".html", inputs=inputs)

    # Classes with their significance take a few seconds.
    trace = read_trace(options.trace)
    inspected = load_traced(trace, options.model)
    classes = view_classes(trace, inspected.tokenizer)
    view = routing_view(
        trace,
        inspected.tokenizer,
        classes=classes,
        ablation=read_ablation(options.ablation, trace) if options.ablation else (),
    )
    view.save(out)

    # The same as text.
    print(loss_sentence(trace))
    print(sentinel_table(sentinel_entropies(trace, inspected.tokenizer)))
    print()
    print(class_summary(trace, classes))
    print(f"The page is {printable(out.resolve())}.")


def class_summary(trace: Trace, classes: list[LayerClasses]) -> str:
    """Returns the expert that each class prefers most, where the preference is significant."""
    num_documents = trace.document.unique().numel()
    if num_documents < LEAST_DOCUMENTS:
        return (
            f"The text has {num_documents} documents; p-values of classes need {LEAST_DOCUMENTS} at least, since "
            "tokens of one document are not independent."
        )

    # The significant expert with the largest lift.
    cells = []
    for table in classes:
        for row in table.rows:
            shown = [number for number, p in enumerate(row.p_values) if p <= _LEVEL]
            if not shown:
                continue

            # A significant expert may also be avoided by a class.
            expert = max(shown, key=lambda number: row.lifts[number])
            if row.lifts[expert] <= 1:
                continue
            cells.append(
                [
                    layer_name(table.key),
                    row.name,
                    f"{row.num_tokens:,}",
                    str(expert + 1),
                    f"{100 * row.shares[expert]:.0f} %",
                    f"{row.lifts[expert]:.1f}",
                    f"{row.p_values[expert]:.3f}",
                ]
            )
    if not cells:
        return "No class of tokens was shown to prefer an expert."
    return format_table(CLASS_HEADER, cells)
