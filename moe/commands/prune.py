"""stmoe prune: makes a sparse model smaller by removing experts.

stmoe prune --from runs/base/model --to runs/pruned --keep 4 --corpus runs/corpus
stmoe prune --from runs/base/model --to runs/pruned --budget 40 --floor 2 --pairs pairs.jsonl
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from moe.checkpoint.loading import load_complete
from moe.cli import Parser, integer, real
from moe.commands.surgery import add_surgery_options, perform_surgery
from moe.commands.surgery_report import ReportTable, SurgeryResult
from moe.data.pipeline import Batch
from moe.errors import ConfigError
from moe.models.modeling import STMoEForConditionalGeneration
from moe.surgery.expert_scores import SCORES
from moe.surgery.prune import ChosenExperts, Pruning, choose_experts, prune_checkpoint
from moe.tracing.examples import generated_batches
from moe.tracing.recorder import TracedBatch
from moe.tracing.trace import layer_name

_ANSWER_TOKENS = 64
_HEADER = ["sparse layer", "kept", "removed experts, with their scores"]


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe prune", description="Removes experts of a sparse model.")
    add_surgery_options(parser, "folder or hub name of a sparse model, ours or a Switch")
    parser.add_argument(
        "--score", choices=SCORES.names(), default="reap", help="what rates the experts (reap)"
    )
    parser.add_argument(
        "--decoder-reads",
        choices=("targets", "answers", "both"),
        help="what the decoder reads for the score: targets, the model's own greedy answers, or both (both)",
    )

    # How many experts stay.
    parser.add_argument("--keep", type=integer(least=1), help="experts of every sparse layer")
    for stack in ("encoder", "decoder"):
        parser.add_argument(
            f"--{stack}-keep",
            type=integer(least=1),
            help=f"experts of every sparse layer of the {stack}",
        )
    parser.add_argument(
        "--budget",
        type=integer(least=1),
        help="experts of all layers together; layers with evenly spread scores keep more",
    )
    parser.add_argument(
        "--least-share",
        type=real(above=0, most=1),
        help="least score of an expert that stays, as a share of its layer's mean score",
    )
    parser.add_argument(
        "--floor",
        type=integer(least=1),
        help="least experts of a layer with --budget or --least-share (4)",
    )
    parser.add_argument(
        "--seed", type=integer(least=0, most=2**32 - 1), help="of --score random (0)"
    )
    return parser


def main(argv: list[str]) -> None:
    """Removes experts of a model, and prints which, and what that changed.

    Args:
        argv: The options.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.floor is not None and options.budget is None and options.least_share is None:
        raise ConfigError("--floor has no effect without --budget or --least-share.")
    is_random = options.score == "random"
    if options.seed is not None and not is_random:
        raise ConfigError("--seed has no effect without --score random.")
    if options.decoder_reads is not None and is_random:
        raise ConfigError("--decoder-reads has no effect with --score random, which reads nothing.")
    settings = {field.name: getattr(options, field.name) for field in fields(Pruning)}
    pruning = Pruning(**{name: value for name, value in settings.items() if value is not None})

    def operate(folder: Path, batches: Sequence[TracedBatch]) -> SurgeryResult:
        """Scores the experts, and writes the pruned model."""
        model = load_complete(STMoEForConditionalGeneration, options.source)
        examples = calibration_batches(model, batches, options.decoder_reads or "both")
        chosen = choose_experts(model, examples, pruning)
        del model
        prune_checkpoint(options.source, folder, chosen.kept)
        return SurgeryResult(
            origins=chosen.kept,
            tables=[ReportTable(_HEADER, removed_rows(chosen))],
            notes=["Scores and losses were computed on the same examples."],
        )

    perform_surgery("prune", argv, options, parser, operate, needs_text=True, check=pruning.numbers)


def calibration_batches(
    model: STMoEForConditionalGeneration, batches: Sequence[TracedBatch], decoder_reads: str
) -> list[Batch]:
    """Returns the batches that rate the experts.

    Args:
        model: The model, which generates the answers.
        batches: With the targets as labels.
        decoder_reads: `targets`, the model's own `answers`, or `both`.
    """
    examples: list[TracedBatch] = []
    if decoder_reads != "answers":
        examples += batches
    if decoder_reads != "targets":
        examples += generated_batches(model, batches, max_tokens=_ANSWER_TOKENS)
    return [traced.batch for traced in examples]


def removed_rows(chosen: ChosenExperts) -> list[list[str]]:
    """Returns for each layer how many experts stay, and the others, numbered from 1, with their scores."""
    rows = []
    for key, scores in chosen.scores.items():
        kept = set(chosen.kept[key].tolist())
        removed = []
        for expert, score in enumerate(scores.tolist()):
            if expert not in kept:
                removed.append(f"{expert + 1} ({score:.3g})")
        number = f"{len(kept)} of {scores.numel()}"
        rows.append([layer_name(key), number, ", ".join(removed) or "none"])
    return rows
