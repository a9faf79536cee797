"""stmoe quantize: stores the experts of a model in 8 or 4 bits, or all of it in 8.

stmoe quantize --from runs/demo/model --to runs/int8 --pairs runs/demo/names/test.jsonl
stmoe quantize --from runs/demo/model --to runs/int4 --bits 4 --group-size 64
stmoe quantize --from runs/demo/model --to runs/small --all
stmoe quantize --from facebook/nllb-moe-54b --to runs/nllb8
"""

from collections.abc import Sequence
from pathlib import Path

from moe.cli import Parser, integer
from moe.commands.surgery import add_surgery_options, perform_surgery
from moe.commands.surgery_report import SurgeryResult
from moe.errors import ConfigError
from moe.kernels.quantized_weight import Quantization
from moe.surgery.quantize import quantize_checkpoint
from moe.tracing.recorder import TracedBatch

_DEFAULT_GROUP = 32


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe quantize", description="Stores weights in 8 or 4 bits.")
    add_surgery_options(
        parser, "folder or hub name of a model of ours, a Switch, a sparse host or NLLB-MoE"
    )
    parser.add_argument(
        "--bits", type=int, choices=(8, 4), default=8, help="bits of a weight of an expert (8)"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="store every matrix but routers' in 8 bits, and compute in floats (experts alone)",
    )
    parser.add_argument(
        "--group-size",
        type=integer(least=2),
        help=f"weights that share a scale, with --bits 4 ({_DEFAULT_GROUP})",
    )
    return parser


def main(argv: list[str]) -> None:
    """Quantizes a model, and prints what it costs.

    Args:
        argv: The options.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    group_size = options.group_size
    if options.bits == 8 and group_size is not None:
        raise ConfigError(
            f"--group-size {group_size} has no effect with --bits 8, which has one scale for each "
            "output. Leave it out, or give --bits 4."
        )
    if options.bits == 4 and options.all:
        raise ConfigError("--all cannot be combined with --bits 4. Leave one of them out.")
    if options.bits == 4:
        group_size = group_size or _DEFAULT_GROUP
    quantization = Quantization(options.bits, group_size)

    def operate(folder: Path, batches: Sequence[TracedBatch]) -> SurgeryResult:
        """Writes the quantized model."""
        quantize_checkpoint(options.source, folder, quantization, whole=options.all)
        return SurgeryResult()

    perform_surgery("quantize", argv, options, operate)
