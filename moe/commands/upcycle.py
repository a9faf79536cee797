"""stmoe upcycle: makes a sparse model whose experts are copies of a dense model's feed-forward layers.

stmoe upcycle --from google/t5-v1_1-base --to runs/upcycled --experts 8 --corpus runs/corpus
stmoe pretrain --pretrained runs/upcycled --corpus runs/corpus --tokenizer runs/upcycled --out runs/trained
"""

import shlex
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import get_args

import torch

from moe.checkpoint.loading import load_complete
from moe.checksums import write_sums
from moe.cli import Parser, integer, real, word
from moe.commands.convert import new_model_folder, read_fields
from moe.commands.routing_inputs import (
    TaskReader,
    add_inputs,
    check_noise_density,
    describe_inputs,
    read_batches,
    with_tokenizer,
)
from moe.commands.surgery_report import SurgeryReport, compare, measure, size_rows
from moe.convert.t5x import is_t5x
from moe.data.pipeline import Batch
from moe.data.tokenizer import TOKENIZER_FILE
from moe.errors import ConfigError
from moe.files import whole_folder
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.surgery.kept_output import KeptOutput, kept_output
from moe.surgery.upcycle import Method, Upcycling, upcycle_checkpoint
from moe.tracing.recorder import TracedBatch
from moe.tracing.trace import layer_name

_RANDOM_BATCHES = 4


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    default = Upcycling()
    parser = Parser(prog="stmoe upcycle", description="Makes a dense model sparse.")
    parser.add_argument(
        "--from",
        dest="source",
        type=word,
        required=True,
        help="folder or hub name of a dense T5 or of a dense model of ours",
    )
    parser.add_argument("--to", required=True, help="the folder to make")

    # Which layers become sparse, and how.
    parser.add_argument(
        "--experts", type=integer(least=2), default=8, help="experts of a sparse layer (8)"
    )
    parser.add_argument(
        "--selected", type=integer(least=1), default=2, help="experts of a token (2)"
    )
    parser.add_argument(
        "--granularity",
        type=integer(least=1),
        default=1,
        help="parts that each expert is cut into; a token uses as many times more experts (1)",
    )
    for stack in ("encoder", "decoder"):
        parser.add_argument(
            f"--{stack}-layers",
            type=integer(least=0),
            help=f"sparse layers of the {stack} (half of its blocks, or the largest smaller number that divides them)",
        )
    parser.add_argument(
        "--method",
        choices=get_args(Method),
        default=default.method,
        help="copy the dense layer, or draw a share of each expert's units anew (copy)",
    )
    parser.add_argument(
        "--reinit-share",
        type=real(above=0, most=1),
        help="share of the units that drop_reinit draws anew (0.5)",
    )
    parser.add_argument(
        "--scale",
        type=real(above=0),
        default=default.scale,
        help="factor on the experts' output (1)",
    )
    parser.add_argument(
        "--seed",
        type=integer(least=0, most=2**32 - 1),
        default=0,
        help="of the routers and redrawn units (0)",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=JSON",
        help="other fields of STMoEConfig, e.g. capacity_factor=2.0",
    )

    # Data on which both models are evaluated.
    add_inputs(parser, required=False)
    return parser


def main(argv: list[str], read_task: TaskReader | None = None) -> None:
    """Upcycles a model, and prints the share of the dense output that it keeps.

    Args:
        argv: The options.
        read_task: Reads the pairs of a task of eval/; None where there is none.
    """
    start = time.perf_counter()
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.reinit_share is not None and options.method != "drop_reinit":
        raise ConfigError("--reinit-share has no effect without --method drop_reinit.")
    upcycling = Upcycling(
        num_experts=options.experts,
        num_selected_experts=options.selected,
        granularity=options.granularity,
        num_sparse_encoder_layers=options.encoder_layers,
        num_sparse_decoder_layers=options.decoder_layers,
        method=options.method,
        reinit_share=options.reinit_share or Upcycling.reinit_share,
        scale=options.scale,
        seed=options.seed,
        fields=read_fields(options.set),
    )
    has_text = bool(options.corpus or options.text or options.pairs or options.task)
    _check_source(options, parser, has_text=has_text)
    inputs = [options.source, options.corpus, options.pairs]
    target = new_model_folder(options.to, inputs)

    # One model in memory at a time.
    with whole_folder(target, kind="model") as folder:
        upcycle_checkpoint(options.source, folder, upcycling)
        if has_text and not (folder / TOKENIZER_FILE).is_file():
            raise ConfigError(
                f"--from {options.source} has no {TOKENIZER_FILE}, which reads the text. Put it "
                "beside the model (AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) makes "
                "it of a spiece.model), or leave the text out."
            )
        before = None
        batches: list[TracedBatch] = []
        if has_text:
            dense = load_complete(STMoEForConditionalGeneration, options.source)
            inspected = with_tokenizer(folder, dense, options.source)
            batches = list(read_batches(options, inspected, read_task))
            before = measure(dense, batches)
            del dense, inspected

        sparse = load_complete(STMoEForConditionalGeneration, folder)
        if before is None:
            text = "random tokens"
            kept = kept_output(sparse, random_batches(sparse.config), scale=options.scale)
            measured = {"loss": None, "loss_change": None, "changed_answers": None}
        else:
            text = describe_inputs(options, sparse.config)
            kept = kept_output(sparse, [batch.batch for batch in batches], scale=options.scale)
            losses, change, changed = compare(before, measure(sparse, batches))
            measured = {
                "loss": losses,
                "loss_change": change,
                "changed_answers": (changed, len(before.documents)),
            }
        report = SurgeryReport(
            command=shlex.join(["stmoe", "upcycle", *argv]),
            source=options.source,
            sizes=size_rows(options.source, folder),
            text=text,
            kept=[_kept_row(row, upcycling) for row in kept],
            seconds=time.perf_counter() - start,
            **measured,
        )
        report.write(folder)
        write_sums(folder)

    print(report)
    if scale := _restoring_scale(kept):
        print(
            f"--scale {scale * options.scale:.3g} brings the output back to that of the dense model, "
            "on average over tokens and layers."
        )
    print(f"The model is in {target}.")


def _check_source(options: Namespace, parser: Parser, *, has_text: bool) -> None:
    """Raises a ConfigError for a source that cannot be measured, or an option without effect."""
    if is_t5x(options.source):
        raise ConfigError(
            f"--from {options.source} is a checkpoint of T5X. Convert it first: "
            f"stmoe convert --from {options.source} --to MODEL"
        )
    if has_text:
        check_noise_density(options)
        return
    for name in ("split", "examples", "inputs_length", "noise_density", "batch_size"):
        if getattr(options, name) != parser.get_default(name):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect without text. Leave it out, or give "
                "--corpus, --text, --pairs or --task."
            )


def random_batches(config: STMoEConfig) -> Iterator[Batch]:
    """Yields batches of random tokens, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(_RANDOM_BATCHES):
        shape = (16, 64)
        input_ids = torch.randint(2, config.vocab_size, shape, generator=generator)
        labels = torch.randint(2, config.vocab_size, shape, generator=generator)
        yield {"input_ids": input_ids, "labels": labels}


def _kept_row(row: KeptOutput, upcycling: Upcycling) -> tuple[str, float, float, str]:
    reasons = row.losses()
    if upcycling.method == "drop_reinit":
        reasons.append("the units drawn anew, which the numbers leave out")
    name = layer_name(row.key)
    return name, row.training.accepted, row.evaluation.accepted, "; ".join(reasons) or "nothing"


def _restoring_scale(kept: list[KeptOutput]) -> float | None:
    """Returns the factor that compensates for small gates; None if no compensation is needed."""
    mean = sum(row.training.requested for row in kept) / len(kept)
    return 1 / mean if abs(mean - 1) > 1e-3 else None
