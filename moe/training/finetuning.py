"""Fine-tuning as in the paper: where it starts from, and which settings of the model it changes."""

from pathlib import Path

import torch

from moe.models.configuration import STMoEConfig
from moe.models.loading import check_model_folder, load_complete
from moe.models.modeling import STMoEForConditionalGeneration
from moe.training.recipe import FinetuneRecipe


def load_for_finetuning(folder: Path, recipe: FinetuneRecipe) -> STMoEForConditionalGeneration:
    """Returns the model to fine-tune: of the folder's architecture, with the recipe's dropout and routing settings.

    Args:
        folder: A model saved by `save_pretrained`.
        recipe: `init` says whether weights are the folder's or fresh ones, drawn from `seed`.

    Raises:
        CheckpointError: When there is no model of this library in the folder, or its weights are not complete.
    """
    check_model_folder(folder)
    config = STMoEConfig(**{**STMoEConfig.from_pretrained(folder).to_dict(), **recipe.model})
    if recipe.init == "scratch":
        torch.manual_seed(recipe.seed)
        return STMoEForConditionalGeneration(config)
    return load_complete(STMoEForConditionalGeneration, folder, config=config)
