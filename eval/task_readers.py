"""Readers of tasks and texts for the verbs of `stmoe`, which know them only in the repository."""

from pathlib import Path

from eval.answers.data_ranks import DataRanks
from eval.corpora.dictionary import find_dictionary, read_dictionary
from eval.corpora.packages import read_packages
from eval.corpora.wordnet import find_wordnet, read_synsets, wordnet_documents
from eval.dev_scores import read_tasks
from eval.task import TASKS
from moe.checkpoint.best_model import DevEvaluation
from moe.commands.build_corpus import RepositoryReaders, UnseenTask
from moe.commands.finetune import FinetuningData
from moe.data.documents import Document
from moe.distributed.launch import World
from moe.distributed.mesh import Mesh, MeshConfig
from moe.tracing.examples import SourceText
from moe.training.recipe import MixtureRecipe


def unseen_task(name: str) -> UnseenTask:
    """Returns the validation and test examples of a task, which must not be in a corpus."""
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


def _read_wordnet(folder: Path | None) -> list[Document]:
    return wordnet_documents(read_synsets(find_wordnet(folder)))


def _read_dictionary(file: Path | None) -> list[Document]:
    return read_dictionary(find_dictionary(file))


CORPUS_READERS = RepositoryReaders(
    unseen_task=unseen_task,
    packages=read_packages,
    wordnet=_read_wordnet,
    dictionary=_read_dictionary,
)
"""Sources that `stmoe corpus` reads in the repository only."""


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
