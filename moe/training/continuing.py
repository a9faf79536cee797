"""Pre-training that goes on from a model: what of it may change.

The recipe describes the whole model, so that it can be read without the folder; here both are held
against each other. `scripts.pretrain --pretrained` comes here.
"""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from moe.checkpoint.loading import check_model_folder
from moe.data.tokenizer import load_tokenizer
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.training.recipe import FinetuneRecipe, PretrainRecipe

# Routers choose by the scores of the same gate, each in its own way.
_MAY_CHANGE = FinetuneRecipe.model_fields | {"router", "decoder_router"}

# They say how fresh weights are drawn, and none are.
_WITHOUT_EFFECT = frozenset({"initializer_scale", "router_initializer_std"})


def check_continues(folder: Path, config: STMoEConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuses a model that a run cannot go on from.

    Args:
        folder: A model saved by `save_pretrained`.
        config: The recipe's.
        tokenizer: The run's.

    Raises:
        CheckpointError: When the folder holds no model.
        ConfigError: When the recipe describes another architecture, or the tokenizer is another;
            names what differs.
    """
    check_model_folder(folder)
    saved = STMoEConfig.from_pretrained(folder)
    differing: list[str] = []
    for name in sorted(PretrainRecipe.model_fields - _MAY_CHANGE - _WITHOUT_EFFECT):
        given = getattr(config, name)
        found = getattr(saved, name)
        if given != found:
            differing.append(f"model.{name} is {given!r}, the model has {found!r}")
    if differing:
        raise ConfigError(
            f"The model in {folder} is not the one that the recipe describes: "
            f"{'; '.join(differing)}. Give the recipe that it was trained with, or these settings."
        )

    # Of another vocabulary, every row of the embedding would mean another word.
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"The tokenizer is not that of the model in {folder}, whose embeddings are of its own "
            f"tokens. Give --tokenizer {folder}."
        )
