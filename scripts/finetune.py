"""Fine-tunes a model: `stmoe finetune`, which here knows the tasks of eval/.

See moe/commands/finetune.py.

    python -m scripts.finetune --config recipes/st_moe_base_superglue.yaml [--resume]
    python -m scripts.finetune --pretrained runs/pretrain/model --task unicode_category --out runs/finetune
"""

if __name__ == "__main__":  # before the imports that take seconds
    from stmoe import start_command

    start_command(one_run=True)

from eval.answers.data_ranks import DataRanks
from eval.dev_scores import read_tasks
from moe.checkpoint.best_model import DevEvaluation
from moe.cli import RESUME, run_main
from moe.commands import finetune
from moe.commands.finetune import FinetuningData
from moe.distributed.launch import World
from moe.distributed.mesh import Mesh, MeshConfig
from moe.training.recipe import MixtureRecipe


def read_mixture(mixture: MixtureRecipe) -> FinetuningData:
    """Returns the training and validation examples of the tasks of eval/ in a mixture."""
    tasks = read_tasks(mixture.tasks, mixture.folder)

    def build_dev_scorer(
        world: World, mesh_config: MeshConfig, mesh: Mesh | None
    ) -> DevEvaluation | None:
        ranks = DataRanks(world, mesh_config, mesh)
        return tasks.scores(mixture.dev_examples, ranks)

    return FinetuningData(tasks.train, tasks.dev_pairs(), build_dev_scorer)


def main(argv: list[str]) -> None:
    """Fine-tunes on tasks or on pairs of texts."""
    finetune.main(argv, read_mixture)


if __name__ == "__main__":
    run_main(main, interrupted=RESUME)
