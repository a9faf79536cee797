"""A run: all that the training loop is given, and what lies in its folder."""

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from moe.checkpoint.best_model import DevEvaluation
from moe.data.pipeline import BatchSource
from moe.distributed.replica_groups import ReplicaGroups
from moe.files import register_folder_kind
from moe.training.build import BuiltModel
from moe.training.heldout_loss import HeldOut
from moe.training.recipe import Recipe

MODEL_FOLDER = "model"
CHECKPOINTS_FOLDER = "checkpoints"
TRAINING_RUN = register_folder_kind("training run", markers=[], parts=[CHECKPOINTS_FOLDER])
RECIPE_FILE = "recipe.yaml"


class Run(NamedTuple):
    """Everything that a run is made of.

    Attributes:
        folder: Receives metrics.jsonl, timeline.jsonl, tensorboard/, probe/, checkpoints/, recipe.yaml, with
            several ranks rank_seconds.jsonl, and in the end model/; on several machines it lies on
            a file system that all of them see.
        recipe: All settings.
        built: The model with its initial weights, on its device or mesh.
        tokenizer: Saved beside the model.
        source: Training batches.
        held_out: Batches for the held-out loss; None for no such measure.
        earlier_checkpoints: Folder of the checkpoints of an earlier run, whose optimizer state the
            first step starts with; None for fresh state.
        dev: Scores models at every evaluation; the best stays in best/, see best_model.py. None
            for no scores.
        probe_source: Held-out batches, not packed, of which the first are probed; None for none.
        workers: Processes that make batches ahead; see `batches_ahead`.
        replicas: Replica groups that take every step with this one, each with a folder of its own;
            None where no replica may be lost.
    """

    folder: Path
    recipe: Recipe
    built: BuiltModel
    tokenizer: PreTrainedTokenizerFast
    source: BatchSource
    held_out: HeldOut | None
    earlier_checkpoints: Path | None = None
    dev: DevEvaluation | None = None
    probe_source: BatchSource | None = None
    workers: int | None = 0
    replicas: ReplicaGroups | None = None
