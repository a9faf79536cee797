"""stmoe upcycle: makes a sparse model whose experts are copies of a dense model's feed-forward layers.

    stmoe upcycle --from google/t5-v1_1-base --to runs/upcycled --experts 8 --corpus runs/corpus
    stmoe pretrain --pretrained runs/upcycled --corpus runs/corpus --tokenizer runs/upcycled --out runs/trained

The experts of a sparse model get twins, or are cut into parts:

    stmoe upcycle --from runs/trained/model --to runs/larger --experts 16 --granularity 2

A host of moe/hosts stays a model of transformers:

    stmoe upcycle --from google/t5gemma-2b-2b-ul2 --to runs/t5gemma_sparse --experts 8
"""

import math
import shlex
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from moe.checkpoint.loading import load_complete
from moe.checksums import write_sums
from moe.cli import Parser, integer, real
from moe.commands.convert import new_model_folder, read_fields
from moe.commands.routing_inputs import TaskReader
from moe.commands.surgery import DATA_OPTIONS, add_surgery_options, perform_surgery
from moe.commands.surgery_report import ReportTable, SurgeryReport, SurgeryResult
from moe.convert.t5x import is_t5x
from moe.data.pipeline import Batch
from moe.errors import ConfigError, MoEError
from moe.files import whole_folder, write_text
from moe.hosts.all_hosts import find_host, load_host
from moe.hosts.upcycle import upcycle_host_folder
from moe.models.card import CARD_NAME
from moe.models.checkpoint_formats import CHECKPOINT_FORMATS, OUR_MODEL_TYPE
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.weight_files import find_weight_files, open_weights
from moe.sparse.editing import sparse_layers
from moe.surgery.add_experts import AddedExperts, add_experts
from moe.surgery.kept_output import KeptOutput, kept_output
from moe.surgery.prune import experts_of_layers
from moe.surgery.upcycle import Method, Upcycling, upcycle_checkpoint
from moe.tracing.recorder import TracedBatch
from moe.tracing.trace import layer_name

_KEPT_HEADER = ["sparse layer", "kept in training", "in evaluation", "lost by"]
_RANDOM_BATCHES = 4
_DATA = ("corpus", "text", "pairs", "task")
_HOST_CARD = """---
library_name: transformers
---
# {0}

A model of transformers with sparse feed-forward layers of the library `moe`:

```python
from moe.hosts.all_hosts import load_host

model = load_host(FOLDER)
```

## Surgery

{1}"""

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


def main(argv: list[str], read_task: TaskReader | None = None) -> None:
    """Upcycles a model, and prints the share of the dense output that it keeps.

    Args:
        argv: The options.
        read_task: Reads the pairs of a task of eval/; None where there is none.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.reinit_share is not None and options.method != "drop_reinit":
        raise ConfigError("--reinit-share has no effect without --method drop_reinit.")
    sparse = _sparse_config(options.source)
    if sparse is not None:
        _add_experts(argv, options, parser, sparse, read_task)
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

    if _is_foreign(options.source):
        _upcycle_host(argv, options, parser, upcycling)
        return

    def operate(folder: Path, batches: Sequence[TracedBatch]) -> SurgeryResult:
        """Writes the sparse model, and measures what it keeps."""
        upcycle_checkpoint(options.source, folder, upcycling)
        sparse = load_complete(STMoEForConditionalGeneration, folder)
        examples = [batch.batch for batch in batches] or random_batches(sparse.config.vocab_size)
        kept = kept_output(sparse, examples, scale=options.scale)

        rows = [_kept_row(row, upcycling) for row in kept]
        notes = []
        if factor := _restoring_scale(kept):
            notes.append(
                f"--scale {factor * options.scale:.3g} brings the output back to that of the dense "
                "model, on average over tokens and layers."
            )
        return SurgeryResult(tables=[ReportTable(_KEPT_HEADER, rows)], notes=notes)

    perform_surgery("upcycle", argv, options, parser, operate, read_task)


def _sparse_config(source: str) -> STMoEConfig | None:
    """Returns the config of a sparse model; None for others, and for what cannot be read."""
    if is_t5x(source):
        return None
    try:
        config = STMoEConfig.from_pretrained(source)
    except (OSError, MoEError):
        return None
    return config if config.num_experts else None


def _add_experts(
    argv: list[str],
    options: Namespace,
    parser: Parser,
    sparse: STMoEConfig,
    read_task: TaskReader | None,
) -> None:
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

    perform_surgery("upcycle", argv, options, parser, operate, read_task)


def _is_foreign(source: str) -> bool:
    """Returns whether a model is neither ours nor one that this library converts."""
    if is_t5x(source):
        return False
    try:
        raw_config = STMoEConfig.read_raw(source)
    except (OSError, MoEError):
        return False
    known = (None, OUR_MODEL_TYPE, *CHECKPOINT_FORMATS.names())
    return raw_config.get("model_type") not in known


def _upcycle_host(
    argv: list[str], options: Namespace, parser: Parser, upcycling: Upcycling
) -> None:
    """Upcycles a model of transformers that keeps its class, and prints what its layers keep.

    Raises:
        ConfigError: When the model is no known host, or data is given.
    """
    start = time.perf_counter()
    host = find_host(STMoEConfig.read_raw(options.source).get("model_type")).host
    for name in (*_DATA, *DATA_OPTIONS):
        if getattr(options, name) != parser.get_default(name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is not supported for a {host.dense_class.__name__}: "
                "its layers are measured on random tokens. Leave it out."
            )
    target = new_model_folder(options.to, [options.source])

    with whole_folder(target, kind="model") as folder:
        upcycle_host_folder(options.source, folder, upcycling)
        model = load_host(folder).eval()
        kept = kept_output(model, random_batches(model.num_tokens()), scale=upcycling.scale)
        report = SurgeryReport(
            command=shlex.join(["stmoe", "upcycle", *argv]),
            source=options.source,
            sizes=_host_sizes(model, options.source, folder),
            text="",
            effects=None,
            tables=[ReportTable(_KEPT_HEADER, [_kept_row(row, upcycling) for row in kept])],
            seconds=time.perf_counter() - start,
        )
        report.write_json(folder)
        write_text(folder / CARD_NAME, _HOST_CARD.format(type(model).__name__, report.markdown()))
        write_sums(folder)

    print(report)
    if host.norm_after is not None:
        print(
            f"A norm ({host.norm_after}) follows each of these layers: the scale of the gates does "
            "not matter, and only tokens that reach no expert lose the output."
        )
    print(f"The model is in {target}. Load it with moe.hosts.all_hosts.load_host.")


def _host_sizes(model: Any, source: str, folder: Path) -> list[tuple[str, int, int]]:
    """Returns parameters and bytes of a host before and after."""
    stored = open_weights(find_weight_files(source))
    before = sum(math.prod(weight.shape) for weight in stored.values())
    after = sum(parameter.numel() for parameter in model.parameters())
    idle = 0
    for layer in sparse_layers(model).values():
        num_experts = layer.config.num_experts
        weights = sum(weight.numel() for weight in layer.experts.parameters())
        idle += weights // num_experts * (num_experts - layer.config.num_selected_experts)
    return [
        ("parameters", before, after),
        ("parameters that a token uses", before, after - idle),
        ("bytes of weights", _count_bytes(source), _count_bytes(folder)),
    ]


def _count_bytes(model: Path | str) -> int:
    return sum(path.stat().st_size for path in find_weight_files(model))


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
