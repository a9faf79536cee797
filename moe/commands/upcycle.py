"""stmoe upcycle: makes a sparse model whose experts are copies of a dense model's feed-forward layers.

    stmoe upcycle --from google/t5-v1_1-base --to runs/upcycled --experts 8 --corpus runs/corpus
    stmoe pretrain --pretrained runs/upcycled --corpus runs/corpus --tokenizer runs/upcycled --out runs/trained

The experts of a sparse model get twins, or are cut into parts:

    stmoe upcycle --from runs/trained/model --to runs/larger --experts 16 --granularity 2

With --prefix, a sparse model gets experts that only texts with that beginning may use. They start as copies of the
experts that the pairs use most, and fine-tuning then trains them alone:

    stmoe upcycle --from runs/trained/model --to runs/larger --experts 40 --prefix "mk:" --pairs mk.jsonl
    stmoe finetune --pretrained runs/larger --parameters new_experts --train mk.jsonl --out runs/mk

A host of moe/hosts stays a model of transformers:

    stmoe upcycle --from google/t5gemma-2b-2b-ul2 --to runs/t5gemma_sparse --experts 8 --pairs pairs.jsonl
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from moe.checkpoint.loading import empty_model
from moe.cli import Parser, integer
from moe.commands.surgery import add_surgery_options, load_source, perform_surgery
from moe.commands.surgery_report import ReportTable, SurgeryResult
from moe.convert.formats import find_tokenizer
from moe.data.tokenizer import load_tokenizer
from moe.errors import ConfigError, MoEError
from moe.hosts.all_hosts import find_host
from moe.hosts.upcycle import upcycle_host_folder
from moe.models.checkpoint_formats import CHECKPOINT_FORMATS, OUR_MODEL_TYPE
from moe.models.configuration import STMoEConfig
from moe.sparse.editing import sparse_layers
from moe.surgery import prefix_experts
from moe.surgery.add_experts import AddedExperts, add_experts
from moe.surgery.upcycle import Upcycling, upcycle_checkpoint
from moe.tracing.recorder import TracedBatch


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    default = Upcycling()
    parser = Parser(
        prog="stmoe upcycle", description="Makes a dense model sparse, or adds experts."
    )
    add_surgery_options(
        parser,
        "folder or hub name of a T5, of a host such as BART or NLLB, or of a dense or sparse model of ours",
    )
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
        "--layers",
        type=integer(least=0),
        help="sparse layers of each stack (half of its blocks, or the largest smaller number that divides them)",
    )
    parser.add_argument(
        "--granularity",
        type=integer(least=1),
        default=1,
        help="parts that each expert is cut into; a token uses as many times more experts (1)",
    )
    parser.add_argument("--prefix", help="adds experts for texts that begin with this, e.g. mk:")
    return parser


def main(argv: list[str]) -> None:
    """Makes a model sparse, or adds experts to a sparse one."""
    options = build_parser().parse_args(argv)
    sparse = _sparse_config(options.source)
    if options.prefix is not None:
        _add_prefix_experts(argv, options, sparse)
        return
    if sparse is not None:
        _add_experts(argv, options, sparse)
        return
    upcycling = Upcycling(
        num_experts=options.experts or Upcycling.num_experts,
        num_selected_experts=options.selected or Upcycling.num_selected_experts,
        granularity=options.granularity,
        num_sparse_encoder_layers=options.layers,
        num_sparse_decoder_layers=options.layers,
    )
    write_sparse = upcycle_host_folder if _is_host(options.source) else upcycle_checkpoint

    def operate(folder: Path, batches: Sequence[TracedBatch]) -> SurgeryResult:
        """Writes the sparse model."""
        write_sparse(options.source, folder, upcycling)
        return SurgeryResult()

    perform_surgery("upcycle", argv, options, operate)


def _sparse_config(source: str) -> STMoEConfig | None:
    """Returns the config of a sparse model; None for others, and for what cannot be read."""
    try:
        config = STMoEConfig.from_pretrained(source)
    except (OSError, MoEError):
        return None
    return config if config.num_experts else None


def _add_experts(argv: list[str], options: Namespace, sparse: STMoEConfig) -> None:
    """Gives the experts of a sparse model twins or parts, and says first what changes by that."""
    if options.selected is not None or options.layers is not None:
        raise ConfigError(
            f"--selected and --layers have no effect on {options.source}, which has {sparse.num_experts} experts "
            "already: their twins and parts keep its output. Leave them out."
        )
    added = AddedExperts(options.experts, options.granularity)
    factor = added.config(sparse).num_experts // sparse.num_experts
    changes = added.changes(sparse)
    print("\n".join(changes or ["Outputs stay the same up to rounding."]))

    def operate(folder: Path, batches: Sequence[TracedBatch]) -> SurgeryResult:
        """Writes the larger model."""
        config = add_experts(options.source, folder, added)
        parents = {}
        for key, layer in sparse_layers(empty_model(config)).items():
            parents[key] = torch.arange(layer.config.num_experts) // factor
        table = ReportTable(["what changes"], [[change] for change in changes])
        return SurgeryResult(parents, [table] if changes else [])

    perform_surgery("upcycle", argv, options, operate)


def _add_prefix_experts(argv: list[str], options: Namespace, sparse: STMoEConfig | None) -> None:
    """Gives a sparse model experts of a prefix."""
    if sparse is None:
        raise ConfigError(
            f"--prefix adds experts to a sparse model of ours, and {options.source} is none. Make a dense one sparse "
            "first: stmoe upcycle --from MODEL --to SPARSE"
        )
    others = (options.granularity, options.selected, options.layers)
    if options.experts is None or others != (1, None, None):
        raise ConfigError(
            f"--prefix {options.prefix} goes with --experts alone: the experts of a layer after the addition. Leave "
            "--granularity, --selected and --layers out."
        )
    tokenizer = load_tokenizer(find_tokenizer(options.source))
    token_ids = prefix_experts.prefix_token_ids(tokenizer, options.prefix)
    config = prefix_experts.prefix_config(sparse, options.prefix, token_ids, options.experts)

    def operate(folder: Path, batches: Sequence[TracedBatch]) -> SurgeryResult:
        """Writes the larger model."""
        copied = {}
        if batches:
            inputs = [each.batch for each in batches]
            num_new = config.prefix_counts()[-1]
            copied = prefix_experts.used_experts(load_source(options).model, inputs, num_new)
        prefix_experts.add_prefix_experts(options.source, folder, config, copied)
        records = config.prefix_experts or ()
        rows = [[record["prefix"], str(record["num_experts"])] for record in records]
        return SurgeryResult(tables=[ReportTable(["prefix", "experts of each layer"], rows)])

    perform_surgery("upcycle", argv, options, operate)


def _is_host(source: str) -> bool:
    """Returns whether a model is a host; False when it is ours or one that this library converts.

    Raises:
        ConfigError: When it is another one.
    """
    try:
        model_type = STMoEConfig.read_raw(source).get("model_type")
    except (OSError, MoEError):
        return False
    if model_type in (None, OUR_MODEL_TYPE, *CHECKPOINT_FORMATS.names()):
        return False
    find_host(model_type)
    return True
