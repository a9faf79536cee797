r"""stmoe inspect ablate: the loss without each expert, and the classes of tokens that experts serve.

stmoe inspect ablate --trace runs/trace --out runs/ablation.json
stmoe inspect ablate --trace runs/trace --kind reroute --out runs/reroute.json
"""

from moe.cli import Parser, model_path
from moe.commands.routing_inputs import add_batches, add_trace, command_text, load_traced
from moe.files import output_path
from moe.inspection.ablation.ablate import ablate_experts
from moe.inspection.ablation.ablation_table import ablation_text
from moe.inspection.ablation.interventions import INTERVENTIONS
from moe.inspection.page.panel_data import write_ablation
from moe.inspection.statistics.token_classes import classify
from moe.inspection.tables import loss_sentence
from moe.parsing import printable
from moe.tracing.examples import batches_of
from moe.tracing.trace_file import read_trace


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe inspect ablate", description="Ablates experts one by one.")
    add_trace(parser)
    parser.add_argument("--model", type=model_path, help="folder of the model (that of the trace)")
    parser.add_argument("--out", required=True, help="the .json file to write")
    parser.add_argument(
        "--kind", choices=INTERVENTIONS, default="drop", help="intervention on an expert (drop)"
    )
    add_batches(parser)
    return parser


def main(argv: list[str]) -> None:
    """Ablates every expert, prints the tables and writes the file."""
    options = build_parser().parse_args(argv)
    out = output_path(options.out, suffix=".json", inputs=[options.trace, options.model])
    trace = read_trace(options.trace)
    inspected = load_traced(trace, options.model, dropless=options.dropless)

    # Classes of target tokens, whose loss changes, and of encoder tokens.
    tokenizer = inspected.tokenizer
    targets = classify(trace.decoder, tokenizer, tokens="target")
    read = classify(trace.encoder, tokenizer)
    ablation = ablate_experts(
        inspected.model,
        list(batches_of(trace, options.batch_size)),
        dict(zip(targets.names, targets.members, strict=True)),
        intervention=options.kind,
        input_classes=dict(zip(read.names, read.members, strict=True)),
    )

    # The file holds all results; only significant ones are printed.
    write_ablation(ablation, trace, tokenizer, out, command_text("ablate", argv))
    print(loss_sentence(trace))
    print(ablation_text(ablation))
    print(f"The ablation is in {printable(out)}.")
