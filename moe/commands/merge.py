"""stmoe merge: makes a sparse model smaller by merging experts; its routers stay as they are.

stmoe merge --from runs/base/model --to runs/merged --keep 4 --corpus runs/corpus
stmoe merge --from runs/base/model --to runs/merged --budget 40 --method output_clusters --pairs pairs.jsonl
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from moe.checkpoint.loading import load_complete
from moe.cli import Parser, integer
from moe.commands.routing_inputs import TaskReader
from moe.commands.surgery import add_surgery_options, perform_surgery
from moe.commands.surgery_report import ReportTable, SurgeryResult
from moe.models.modeling import STMoEForConditionalGeneration
from moe.sparse.editing import LayerKey
from moe.surgery.merge import GROUPINGS, MergedLayer, Merging, choose_merges, merge_checkpoint
from moe.tracing.recorder import TracedBatch
from moe.tracing.trace import layer_name

_HEADER = ["sparse layer", "stored", "merged experts, with their weights in the mean"]


def build_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="stmoe merge", description="Merges experts of a sparse model.")
    add_surgery_options(parser, "folder or hub name of a sparse model, ours or a Switch")
    parser.add_argument(
        "--method",
        choices=GROUPINGS.names(),
        default=Merging.method,
        help="group experts by their router logits, or by their mean outputs (m_smoe)",
    )
    parser.add_argument(
        "--keep", type=integer(least=1), help="experts that every sparse layer stores"
    )
    parser.add_argument(
        "--budget",
        type=integer(least=1),
        help="experts that all layers store together; layers with evenly used experts store more",
    )
    return parser


def main(argv: list[str], read_task: TaskReader | None = None) -> None:
    """Merges experts of a model, and prints which, and what that changed.

    Args:
        argv: The options.
        read_task: Reads the pairs of a task of eval/; None where there is none.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    merging = Merging(options.method, options.keep, options.budget)

    def operate(folder: Path, batches: Sequence[TracedBatch]) -> SurgeryResult:
        """Groups the experts, and writes the model of their means."""
        model = load_complete(STMoEForConditionalGeneration, options.source)
        merges = choose_merges(model, [traced.batch for traced in batches], merging)
        del model
        merge_checkpoint(options.source, folder, merges)
        return SurgeryResult(
            tables=[ReportTable(_HEADER, merged_rows(merges))],
            notes=[
                "Groups and losses were computed on the same examples.",
                "Where there is a capacity, it grew: a merged expert has the slots of all its rows.",
            ],
        )

    perform_surgery(
        "merge",
        argv,
        options,
        parser,
        operate,
        read_task,
        needs_text=True,
        check=merging.check_model,
    )


def merged_rows(merges: Mapping[LayerKey, MergedLayer]) -> list[list[str]]:
    """Returns for each layer how many experts it stores, and the groups, with experts from 1."""
    rows = []
    for key, layer in merges.items():
        groups = []
        for stored in layer.expert_map.unique():
            members = (layer.expert_map == stored).nonzero().flatten().tolist()
            names = [f"{expert + 1} ({100 * layer.weight[expert]:.0f} %)" for expert in members]
            if len(members) > 1:
                groups.append(" + ".join(names))
        expert_map = layer.expert_map
        number = f"{expert_map.unique().numel()} of {expert_map.numel()}"
        rows.append([layer_name(key), number, ", ".join(groups)])
    return rows
