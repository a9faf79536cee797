"""stmoe prune: makes a sparse model smaller by removing experts.

stmoe prune --from runs/base/model --to runs/pruned --keep 4 --corpus runs/corpus
stmoe prune --from runs/base/model --to runs/pruned --budget 40 --floor 2 --pairs pairs.jsonl
stmoe prune --from runs/nllb --to runs/eng-fra --keep 36 12 --score importance \
    --source-language eng_Latn --target-language fra_Latn --pairs pairs.jsonl
"""

from collections.abc import Sequence
from pathlib import Path

from moe.cli import Parser, integer
from moe.commands.routing_inputs import read_batches
from moe.commands.surgery import add_surgery_options, load_source, perform_surgery
from moe.commands.surgery_report import ReportTable, SurgeryResult
from moe.surgery.prune import SCORE_NAMES, ChosenExperts, Pruning, choose_experts, prune_checkpoint
from moe.tracing.examples import generated_batches
from moe.tracing.recorder import TracedBatch
from moe.tracing.trace import layer_name

_ANSWER_TOKENS = 64
_HEADER = ["sparse layer", "kept", "removed experts, with their scores"]


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe prune", description="Removes experts of a sparse model.")
    add_surgery_options(parser, "folder or hub name of a sparse model, ours, a Switch or a host")
    parser.add_argument(
        "--score", choices=SCORE_NAMES, default="reap", help="what rates the experts (reap)"
    )
    number = parser.add_mutually_exclusive_group(required=True)
    number.add_argument(
        "--keep",
        type=integer(least=1),
        nargs="+",
        help="experts of every sparse layer, or of those of the encoder and of the decoder",
    )
    number.add_argument(
        "--budget",
        type=integer(least=1),
        help="experts of all layers together; layers with evenly spread scores keep more",
    )
    parser.add_argument(
        "--floor",
        type=integer(least=1),
        default=4,
        help="least experts of a layer with a budget (4)",
    )
    parser.add_argument("--seed", type=integer(least=0), default=0, help="of --score random (0)")
    return parser


def main(argv: list[str]) -> None:
    """Removes experts of a model, and prints which, and what that changed.

    The experts are scored on the examples on which the losses are measured. With languages, these
    are the pairs of both; the encoder's experts are scored on all pairs of the source language, the
    decoder's on all of the target language. The decoder reads the targets and, in a second pass,
    the model's own answers.
    """
    options = build_parser().parse_args(argv)
    if options.keep is not None and len(options.keep) == 1:
        (options.keep,) = options.keep
    names = ("score", "keep", "budget", "floor", "seed")
    pruning = Pruning(**{name: getattr(options, name) for name in names})

    def operate(folder: Path, batches: Sequence[TracedBatch]) -> SurgeryResult:
        """Scores the experts, and writes the pruned model."""
        inspected = load_source(options)
        of_source = of_target = batches
        if options.source_language or options.target_language:
            of_source = list(read_batches(options, inspected, ["source"]))
            of_target = list(read_batches(options, inspected, ["target"]))
        answers = generated_batches(inspected.model, of_target, max_tokens=_ANSWER_TOKENS)
        read_by_decoder = [each.batch for each in (*of_target, *answers)]
        read_by_encoder = [each.batch for each in of_source]
        chosen = choose_experts(inspected.model, read_by_encoder, pruning, read_by_decoder)
        del inspected
        prune_checkpoint(options.source, folder, chosen.kept)
        return SurgeryResult(chosen.kept, [ReportTable(_HEADER, removed_rows(chosen))])

    perform_surgery("prune", argv, options, operate, needs_text=True, check=pruning.numbers)


def removed_rows(chosen: ChosenExperts) -> list[list[str]]:
    """Returns for each layer how many experts stay, and the others or those, numbered from 1, with their scores."""
    rows = []
    for key, scores in chosen.scores.items():
        num_rated = scores.numel()  # all but experts of prefixes
        kept = [expert for expert in chosen.kept[key].tolist() if expert < num_rated]
        removed = sorted(set(range(num_rated)) - set(kept))
        shown = min(removed, kept, key=len)
        experts = ", ".join(f"{expert + 1} ({scores[expert]:.3g})" for expert in shown) or "none"
        if shown is kept:
            experts = f"all but {experts}"
        rows.append([layer_name(key), f"{len(kept)} of {num_rated}", experts])
    return rows
