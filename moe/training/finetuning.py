"""Fine-tuning as in the paper: where it starts from, and which settings of the model it changes."""

from pathlib import Path

from moe.models.configuration import STMoEConfig
from moe.models.loading import check_model_folder
from moe.training.placement import PlacedModel, new_model, pretrained_model
from moe.training.recipe import FinetuneRecipe


def finetuning_config(folder: Path, recipe: FinetuneRecipe) -> STMoEConfig:
    """Returns the configuration of the model in a folder with the recipe's dropout and routing settings.

    Raises:
        CheckpointError: When there is no model in the folder.
    """
    check_model_folder(folder)
    return STMoEConfig(**{**STMoEConfig.from_pretrained(folder).to_dict(), **recipe.model})


def load_for_finetuning(
    folder: Path, recipe: FinetuneRecipe, config: STMoEConfig, device_type: str = "cpu"
) -> PlacedModel:
    """Returns the model to fine-tune, on its device or mesh.

    Args:
        folder: A model saved by `save_pretrained`.
        recipe: `init` says whether weights are the folder's or fresh ones, drawn from `seed`.
        config: Of `finetuning_config`.
        device_type: `cpu` or `cuda`.

    Raises:
        CheckpointError: When the weights of the folder are not complete.
    """
    if recipe.init == "scratch":
        return new_model(recipe, config, device_type)
    return pretrained_model(recipe, config, folder, device_type)
