"""A run: the inputs of the training loop, and the files in its folder."""

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
from moe.training.step import ForwardPass, forward_pass

MODEL_FOLDER = "model"
CHECKPOINTS_FOLDER = "checkpoints"
TRAINING_RUN = register_folder_kind("training run", markers=[], parts=[CHECKPOINTS_FOLDER])
RECIPE_FILE = "recipe.yaml"


class Run(NamedTuple):
    """All parts of a run.

    Attributes:
        folder: Folder of metrics.jsonl, timeline.jsonl, tensorboard/, checkpoints/, recipe.yaml and finally
            model/; it must be on a file system that all machines share.
        recipe: All settings.
        built: The model with its initial weights, on its device or mesh.
        tokenizer: Saved next to the model.
        source: Training batches.
        held_out: Batches for the held-out loss; None disables the held-out loss.
        earlier_checkpoints: Folder of the checkpoints of an earlier run, whose optimizer state the
            run starts with; None for fresh state.
        dev: Scores models at every evaluation; the best is kept in best/, see best_model.py. None
            for no scores.
        workers: Processes that make batches ahead; see `batches_ahead`.
        replicas: Replica groups that take every step with this one, each with its own folder; None
            if no replica may be lost.
        forward: Computes the losses of a micro-batch.
    """

    folder: Path
    recipe: Recipe
    built: BuiltModel
    tokenizer: PreTrainedTokenizerFast
    source: BatchSource
    held_out: HeldOut | None
    earlier_checkpoints: Path | None = None
    dev: DevEvaluation | None = None
    workers: int = 0
    replicas: ReplicaGroups | None = None
    forward: ForwardPass = forward_pass
