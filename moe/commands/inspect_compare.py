r"""stmoe inspect compare: the routing of two models on the same text, and its effect on the loss.

stmoe inspect compare --trace runs/trace --model runs/finetune/model --out runs/compare.html
"""

from collections.abc import Mapping

from moe.cli import Parser, model_path
from moe.commands.routing_inputs import add_batches, add_trace, load_traced
from moe.files import output_path
from moe.inspection.ablation.loss_split import LossSplit, split_loss
from moe.inspection.page.routing_view import routing_view
from moe.inspection.statistics.matching import ExpertMatching, match_traces
from moe.inspection.tables import format_table, loss_sentence
from moe.parsing import printable
from moe.sparse.editing import LayerKey
from moe.tracing.examples import batches_of
from moe.tracing.recorder import Provenance, record_routing
from moe.tracing.trace import layer_name
from moe.tracing.trace_file import read_trace

LAYER_HEADER = ["sparse layer", "same partner", "adjusted Rand", "partners"]
LOSS_HEADER = ["", "nats", "95 % interval"]


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe inspect compare", description="Compares the routing of two models.")
    add_trace(parser)
    parser.add_argument(
        "--model",
        type=model_path,
        required=True,
        help="folder of the model to compare with the traced one",
    )
    parser.add_argument(
        "--traced-model", type=model_path, help="folder of the traced model (where it was)"
    )
    parser.add_argument("--out", required=True, help="the .html file to write")
    add_batches(parser)
    return parser


def main(argv: list[str]) -> None:
    """Prints why the losses differ, and writes the view of both."""
    options = build_parser().parse_args(argv)
    inputs = [options.trace, options.model, options.traced_model]
    out = output_path(options.out, suffix=".html", inputs=inputs)
    trace = read_trace(options.trace)
    first = load_traced(trace, options.traced_model, dropless=options.dropless, hosts=False)
    second = load_traced(trace, options.model, dropless=options.dropless, hosts=False)

    # Both read the same batches, and the second one also with the routing of the first.
    batches = list(batches_of(trace, options.batch_size))
    recorded = record_routing(first.model, batches, provenance=Provenance(model=str(first.folder)))
    other = record_routing(second.model, batches, provenance=Provenance(model=str(second.folder)))
    split = split_loss(first.model, second.model, recorded, batches)
    print(split_table(split, str(first.folder), str(second.folder)))
    for traced in (recorded, other):
        print(f"{printable(traced.facts.model)}: {loss_sentence(traced)}")
    print()

    # Expert numbers differ between runs: each expert gets the number of its partner in the first model.
    matchings = match_traces(recorded, other)
    print(agreement_table(matchings))
    matching = {key: numbers_in_first(of_layer) for key, of_layer in matchings.items()}
    view = routing_view(recorded, first.tokenizer, other=other, matching=matching)
    view.save(out)
    print(f"The page is {printable(out.resolve())}.")


def split_table(split: LossSplit, first: str, second: str) -> str:
    """Returns why the loss of one model differs from that of another, as text."""
    rows = [
        [f"loss of {first}", f"{split.first:.4f}", ""],
        [f"loss of {second}", f"{split.second:.4f}", ""],
        ["the same with the routing of the first", f"{split.replayed:.4f}", ""],
    ]
    for name, part in (("routing", split.routing), ("other weights", split.weights)):
        interval = f"{part.low:+.4f} to {part.high:+.4f}"
        rows.append([f"difference by {name}", f"{part.value:+.4f}", interval])
    return format_table(LOSS_HEADER, rows)


def numbers_in_first(matching: ExpertMatching) -> list[int]:
    """Returns for each expert of the second model its partner's number in the first; -1 for none."""
    num_experts = matching.counts.shape[1]
    numbers = [-1] * num_experts
    for number, partner in enumerate(matching.partner.tolist()):
        if partner >= 0:
            numbers[partner] = number
    return numbers


def agreement_table(matchings: Mapping[LayerKey, ExpertMatching]) -> str:
    """Returns the agreement of the routing of two models, layer by layer, as text."""
    rows = []
    for key, matching in matchings.items():
        share = f"{100 * matching.agreement:.1f} %"
        partners = " ".join(str(partner + 1) for partner in matching.partner.tolist())
        rows.append([layer_name(key), share, f"{matching.adjusted_rand:.2f}", partners])
    return format_table(LAYER_HEADER, rows)
