r"""stmoe inspect replay: the loss of a model with the routing of a trace.

stmoe inspect replay --trace runs/trace --model runs/quantised/model
"""

import torch

from moe.cli import Parser, model_path
from moe.commands.routing_inputs import add_batches, add_trace, load_traced
from moe.inspection.ablation.loss_split import token_losses
from moe.inspection.tables import format_table
from moe.tracing.examples import batches_of
from moe.tracing.replay import replay_routing
from moe.tracing.trace_file import read_trace

HEADER = ["routing", "mean loss (nats)", "target tokens"]


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe inspect replay", description="Replays the routing of a trace.")
    add_trace(parser)
    parser.add_argument(
        "--model", type=model_path, help="folder of the model that replays it (that of the trace)"
    )
    add_batches(parser)
    return parser


def main(argv: list[str]) -> None:
    """Prints the loss with the model's own routing and with the trace's routing."""
    options = build_parser().parse_args(argv)
    trace = read_trace(options.trace)
    model = load_traced(trace, options.model, dropless=options.dropless, hosts=False).model
    batches = list(batches_of(trace, options.batch_size))

    # The same batches twice: with the router's own choices, and with the trace's choices.
    recorded = token_losses(model, batches)
    with replay_routing(model, trace):
        replayed = token_losses(model, batches)
    rows = []
    for name, losses in (("its own", recorded), (f"that of {options.trace}", replayed)):
        rows.append([name, f"{losses.mean():.6f}", f"{losses.numel():,}"])
    print(format_table(HEADER, rows))

    is_same = torch.equal(recorded, replayed)
    print("Every token's loss is the same." if is_same else "The losses differ.")
