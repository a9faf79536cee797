r"""stmoe inspect record: records the experts of every token.

stmoe inspect record --model runs/demo/model --pairs runs/demo/names/test.jsonl --by-prefix --out runs/trace
stmoe inspect record --model runs/pretrain/model --text news=a.txt code=b.md --best 4 --out runs/trace
"""

from tqdm import tqdm

from moe.checksums import model_fingerprint
from moe.cli import Parser, integer
from moe.commands.routing_inputs import (
    add_inputs,
    command_text,
    describe_inputs,
    load_inspected,
    read_batches,
    tokenizer_fingerprint,
)
from moe.files import check_kind, output_path
from moe.inspection.tables import health_text, loss_sentence
from moe.parsing import printable
from moe.tracing.recorder import Provenance
from moe.tracing.trace_file import TRACE_FILE, read_trace, record_to_folder


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe inspect record", description="Records the routing of a text.")
    parser.add_argument("--out", required=True, help="folder of the trace to write")
    parser.add_argument(
        "--best",
        type=integer(least=0),
        default=0,
        help="number of best experts whose probabilities are recorded, too (0)",
    )
    add_inputs(parser)
    return parser


def main(argv: list[str]) -> None:
    """Records the routing, and prints statistics of the routers.

    Args:
        argv: The options.
    """
    options = build_parser().parse_args(argv)

    # Reject invalid options before loading the model.
    inputs = [options.model, options.corpus, options.pairs]
    out = output_path(options.out, inputs=inputs)
    check_kind(out, "trace")

    # The provenance of the trace.
    inspected = load_inspected(options.model, dropless=options.dropless)
    batches = read_batches(options, inspected)
    provenance = Provenance(
        text=describe_inputs(options, inspected),
        model=str(options.model),
        model_fingerprint=model_fingerprint(options.model),
        tokenizer_fingerprint=tokenizer_fingerprint(inspected.tokenizer),
        command=command_text("record", argv),
    )
    facts = record_to_folder(
        inspected.model,
        tqdm(batches, desc="record", unit=" batches"),
        out,
        num_best=options.best,
        provenance=provenance,
    )

    # Statistics of the routers, and the size of the trace.
    trace = read_trace(out)
    num_tokens = trace.encoder.ids.numel() + trace.decoder.ids.numel()
    megabytes = (out / TRACE_FILE).stat().st_size / 1e6
    print(health_text(trace.layers))
    print(f"Traced: {printable(facts.text)}.")
    print(loss_sentence(trace))
    print(
        f"{facts.num_examples:,} examples, {num_tokens:,} tokens, {megabytes:.1f} MB. "
        f"The trace is in {printable(out)}."
    )
