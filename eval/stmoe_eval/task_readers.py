"""Readers of tasks for the verbs of `stmoe`, which find them by the entry points of the wheel."""

from moe.checkpoint.best_model import DevEvaluation
from moe.commands.finetune import FinetuningData
from moe.distributed.launch import World
from moe.distributed.mesh import Mesh, MeshConfig
from moe.tracing.examples import SourceText
from moe.training.recipe import MixtureRecipe
from stmoe_eval.answers.data_ranks import DataRanks
from stmoe_eval.dev_scores import read_tasks
from stmoe_eval.task import TASKS


def read_mixture(mixture: MixtureRecipe) -> FinetuningData:
    """Returns the training and validation examples of the tasks in a mixture."""
    tasks = read_tasks(mixture.tasks, mixture.folder)

    def build_dev_scorer(
        world: World, mesh_config: MeshConfig, mesh: Mesh | None
    ) -> DevEvaluation | None:
        ranks = DataRanks(world, mesh_config, mesh)
        return tasks.scores(mixture.dev_examples, ranks)

    return FinetuningData(tasks.train, tasks.dev_pairs(), build_dev_scorer)


def read_pairs(name: str, split: str) -> list[SourceText]:
    """Returns the pairs of a split of a task; examples of one group form one document."""
    documents: dict[str, int] = {}
    pairs = []
    for example in TASKS.get(name).examples(split):
        document = documents.setdefault(example.group, len(documents))
        pairs.append(SourceText(example.inputs, example.targets, document, name))
    return pairs
