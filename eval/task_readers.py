"""Readers of tasks for the verbs of `stmoe`, which know tasks only where the repository is."""

from eval.answers.data_ranks import DataRanks
from eval.dev_scores import read_tasks
from eval.task import TASKS
from moe.checkpoint.best_model import DevEvaluation
from moe.commands.build_corpus import UnseenTask
from moe.commands.finetune import FinetuningData
from moe.distributed.launch import World
from moe.distributed.mesh import Mesh, MeshConfig
from moe.tracing.examples import SourceText
from moe.training.recipe import MixtureRecipe


def unseen_task(name: str) -> UnseenTask:
    """Returns the validation and test examples of a task, which no corpus may hold."""
    task = TASKS.get(name)
    sources: set[str] = set()
    inputs: dict[str, list[str]] = {}
    for split in ("validation", "test"):
        if split not in task.source.splits:
            continue
        examples = task.examples(split)
        sources |= {example.group for example in examples}
        inputs[split] = [example.inputs for example in examples]
    return UnseenTask(name, sources, inputs)


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
