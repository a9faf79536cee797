"""stmoe upcycle: makes a sparse model whose experts are copies of a dense model's feed-forward layers.

    stmoe upcycle --from google/t5-v1_1-base --to runs/upcycled --experts 8 --corpus runs/corpus
    stmoe pretrain --pretrained runs/upcycled --corpus runs/corpus --tokenizer runs/upcycled --out runs/trained

The experts of a sparse model get twins, or are cut into parts:

    stmoe upcycle --from runs/trained/model --to runs/larger --experts 16 --granularity 2

A host of moe/hosts stays a model of transformers:

    stmoe upcycle --from google/t5gemma-2b-2b-ul2 --to runs/t5gemma_sparse --experts 8 --pairs pairs.jsonl
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch

from moe.cli import Parser, integer, real
from moe.commands.convert import read_fields
from moe.commands.surgery import add_surgery_options, perform_surgery
from moe.commands.surgery_report import ReportTable, SurgeryResult
from moe.convert.t5x import is_t5x
from moe.data.pipeline import Batch
from moe.errors import ConfigError, MoEError
from moe.hosts.all_hosts import find_host, load_model
from moe.hosts.host import Host
from moe.hosts.upcycle import upcycle_host_folder
from moe.models.checkpoint_formats import CHECKPOINT_FORMATS, OUR_MODEL_TYPE
from moe.models.configuration import STMoEConfig
from moe.surgery.add_experts import AddedExperts, add_experts
from moe.surgery.kept_output import KeptOutput, kept_output
from moe.surgery.prune import experts_of_layers
from moe.surgery.upcycle import Method, Upcycling, upcycle_checkpoint
from moe.tracing.recorder import TracedBatch
from moe.tracing.trace import layer_name

_KEPT_HEADER = ["sparse layer", "kept in training", "in evaluation", "lost by"]
_RANDOM_BATCHES = 4
_FOR_DENSE_MODELS = (
    "selected",
    "encoder_layers",
    "decoder_layers",
    "method",
    "reinit_share",
    "scale",
    "seed",
    "set",
)


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    default = Upcycling()
    parser = Parser(
        prog="stmoe upcycle", description="Makes a dense model sparse, or adds experts."
    )
    add_surgery_options(
        parser, "folder or hub name of a T5 or T5Gemma, or of a dense or sparse model of ours"
    )

    # Which layers become sparse, and how.
    parser.add_argument(
        "--experts",
        type=integer(least=2),
        help=f"experts of a sparse layer ({default.num_experts}, or those of a sparse model)",
    )
    parser.add_argument(
        "--selected",
        type=integer(least=1),
        help=f"experts of a token ({default.num_selected_experts})",
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
    return parser


def main(argv: list[str]) -> None:
    """Upcycles a model, and prints the share of the dense output that it keeps.

    Args:
        argv: The options.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.reinit_share is not None and options.method != "drop_reinit":
        raise ConfigError("--reinit-share has no effect without --method drop_reinit.")
    sparse = _sparse_config(options.source)
    if sparse is not None:
        _add_experts(argv, options, parser, sparse)
        return
    upcycling = Upcycling(
        num_experts=options.experts or Upcycling.num_experts,
        num_selected_experts=options.selected or Upcycling.num_selected_experts,
        granularity=options.granularity,
        num_sparse_encoder_layers=options.encoder_layers,
        num_sparse_decoder_layers=options.decoder_layers,
        method=options.method,
        reinit_share=options.reinit_share or Upcycling.reinit_share,
        scale=options.scale,
        seed=options.seed,
        fields=read_fields(options.set),
    )

    host = _find_host(options.source)

    def operate(folder: Path, batches: Sequence[TracedBatch]) -> SurgeryResult:
        """Writes the sparse model, and measures what it keeps."""
        write_sparse = upcycle_checkpoint if host is None else upcycle_host_folder
        write_sparse(options.source, folder, upcycling)
        sparse = load_model(folder).eval()
        examples = [batch.batch for batch in batches] or random_batches(sparse.config.vocab_size)
        kept = kept_output(sparse, examples, scale=options.scale)

        rows = [_kept_row(row, upcycling) for row in kept]
        notes = []
        if host is not None and host.norm_after is not None:
            notes.append(
                f"A norm ({host.norm_after}) follows each of these layers: the scale of the gates does "
                "not matter, and only tokens that reach no expert lose the output."
            )
        elif factor := _restoring_scale(kept):
            notes.append(
                f"--scale {factor * options.scale:.3g} brings the output back to that of the dense "
                "model, on average over tokens and layers."
            )
        return SurgeryResult(tables=[ReportTable(_KEPT_HEADER, rows)], notes=notes)

    perform_surgery("upcycle", argv, options, parser, operate)


def _sparse_config(source: str) -> STMoEConfig | None:
    """Returns the config of a sparse model; None for others, and for what cannot be read."""
    if is_t5x(source):
        return None
    try:
        config = STMoEConfig.from_pretrained(source)
    except (OSError, MoEError):
        return None
    return config if config.num_experts else None


def _add_experts(argv: list[str], options: Namespace, parser: Parser, sparse: STMoEConfig) -> None:
    """Gives the experts of a sparse model twins or parts, and says first what changes by that."""
    for name in _FOR_DENSE_MODELS:
        if getattr(options, name) != parser.get_default(name):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect on {options.source}, which has {sparse.num_experts} experts "
                "already: their twins and parts keep its output. Leave it out."
            )
    added = AddedExperts(options.experts, options.granularity)
    config = added.config(sparse)
    changes = added.changes(sparse)
    print("\n".join(changes or ["Outputs stay the same up to rounding."]))

    def operate(folder: Path, batches: Sequence[TracedBatch]) -> SurgeryResult:
        """Writes the larger model."""
        add_experts(options.source, folder, added)
        factor = config.num_experts // sparse.num_experts
        parents = {}
        for key, number in experts_of_layers(config).items():
            parents[key] = torch.arange(number) // factor
        table = ReportTable(["what changes"], [[change] for change in changes])
        return SurgeryResult(parents, [table] if changes else [])

    perform_surgery("upcycle", argv, options, parser, operate)


def _find_host(source: str) -> Host | None:
    """Returns what kind of host a model is; None when it is ours or one that this library converts.

    Raises:
        ConfigError: When it is another one.
    """
    if is_t5x(source):
        return None
    try:
        model_type = STMoEConfig.read_raw(source).get("model_type")
    except (OSError, MoEError):
        return None
    known = (None, OUR_MODEL_TYPE, *CHECKPOINT_FORMATS.names())
    return None if model_type in known else find_host(model_type).host


def random_batches(vocab_size: int) -> Iterator[Batch]:
    """Yields batches of random tokens, the same in every call.

    Args:
        vocab_size: Number of tokens to draw from.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(_RANDOM_BATCHES):
        shape = (16, 64)
        input_ids = torch.randint(2, vocab_size, shape, generator=generator)
        labels = torch.randint(2, vocab_size, shape, generator=generator)
        yield {"input_ids": input_ids, "labels": labels}


def _kept_row(row: KeptOutput, upcycling: Upcycling) -> list[str]:
    reasons = row.losses()
    if upcycling.method == "drop_reinit":
        reasons.append("the units drawn anew, which the numbers leave out")
    shares = (row.training.accepted, row.evaluation.accepted)
    return [
        layer_name(row.key),
        *(f"{share:.3f}" for share in shares),
        "; ".join(reasons) or "nothing",
    ]


def _restoring_scale(kept: list[KeptOutput]) -> float | None:
    """Returns the factor that compensates for small gates; None if no compensation is needed."""
    mean = sum(row.training.requested for row in kept) / len(kept)
    return 1 / mean if abs(mean - 1) > 1e-3 else None
