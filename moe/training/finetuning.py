"""Fine-tuning after the paper: where a run starts, which settings it changes, and what it trains on.

Which parameters train is chosen by `select_parameters`, in moe/models/subsets.py.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from moe.checkpoint.loading import check_model_folder
from moe.data.pairs import Sentinels
from moe.data.tokenizer import SpecialIds, end_with_sentinel
from moe.errors import CheckpointError, ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.training.build import BuiltModel, build_new_model, load_pretrained_model
from moe.training.recipe import FinetuneRecipe, MixtureRecipe


def finetuning_overrides(**changes: Any) -> dict[str, Any]:
    """Returns the settings of a model that fine-tuning changes: the paper's dropout, and `changes`.

    They are those of a recipe's `model:` section. To turn the routers' losses off, give both
    weights as 0.

    Example:
        overrides = finetuning_overrides(capacity_factor=2.0, load_balance_loss_weight=0.0)
        model = STMoEForConditionalGeneration.from_pretrained(folder, **overrides)

    Args:
        changes: Fields of STMoEConfig that belong to no weight, e.g. `dropout_rate` (0.1),
            `expert_dropout_rate` (0.4), `capacity_factor`, `eval_capacity_factor`,
            `load_balance_loss_weight`; others stay as the model has them.

    Raises:
        ConfigError: When a field is unknown or belongs to the architecture.

    Source:
        Switch (arXiv:2101.03961) table 4: dropout 0.1, inside experts 0.4. ST-MoE
        (arXiv:2202.08906) §4.4: the balance loss stays on, higher capacities do not help.
    """
    return dict(FinetuneRecipe(model=changes).model)


def choose_data(
    recipe: FinetuneRecipe, task: str | None, train: Path | None, typed: Collection[str]
) -> FinetuneRecipe:
    """Returns the recipe with the tasks that the run trains on; none of them for pairs of texts.

    Args:
        recipe: May name a mixture of tasks.
        task: The only task, or None.
        train: File of pairs, or None.
        typed: Names of the settings on the command line; they win over those of a recipe.

    Raises:
        ConfigError: When there is nothing to train on, or more than one thing, or a setting that
            changes nothing.
    """
    # Of several things to train on, those that are typed win over those of the recipe.
    options = {"task": task, "train": train, "mixture.tasks": recipe.mixture.tasks}
    given = [name for name, value in options.items() if value not in (None, [])]
    chosen = [name for name in given if name in typed] or given
    if len(chosen) != 1:
        found = " and ".join(f"{name} {options[name]}" for name in chosen) or "nothing"
        raise ConfigError(
            f"{found} given to train on; expected one of --task, --train and mixture.tasks."
        )

    # Pairs of texts are no task: settings of a mixture would do nothing.
    if chosen == ["train"]:
        idle = sorted(name for name in typed if name.startswith("mixture."))
        if idle:
            raise ConfigError(
                f"{', '.join(idle)} would change nothing: {train} is no task. Leave it out."
            )
        return dataclasses.replace(recipe, mixture=MixtureRecipe())

    tasks = recipe.mixture.tasks
    if task is not None and chosen == ["task"]:
        tasks = [task]
    return dataclasses.replace(recipe, mixture=dataclasses.replace(recipe.mixture, tasks=tasks))


def finetuning_config(folder: Path, recipe: FinetuneRecipe) -> STMoEConfig:
    """Returns the configuration of a folder's model with the recipe's dropout and routing settings.

    Raises:
        CheckpointError: When there is no model in the folder.
        ConfigError: When a capacity factor is given that the model's absolute capacity makes idle.
    """
    try:
        check_model_folder(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} To have one, pre-train it (stmoe pretrain --config recipes/st_moe_base_pretrain.yaml "
            f"--out {folder.parent} leaves it in {folder.parent}/model), or convert a published one (python -m "
            f"stmoe convert --from google/switch-base-8 --to {folder}) and fine-tune it with "
            "--optimizer_state reset."
        ) from None

    # A capacity in slots, the model's or the recipe's, makes a factor idle.
    config = STMoEConfig.from_pretrained(folder)
    idle = [name for name in ("capacity_factor", "eval_capacity_factor") if name in recipe.model]
    if idle and recipe.model.get("expert_capacity", config.expert_capacity) is not None:
        raise ConfigError(
            f"{' and '.join(idle)} would change nothing: the model in {folder} has expert_capacity "
            f"{config.expert_capacity}, which takes precedence. Set model.expert_capacity to null, too."
        )
    settings = dict(recipe.model)
    if recipe.init == "scratch":  # fresh weights have seen no masked text
        settings |= {"noise_density": None, "mean_noise_span_length": None}
    return config.replaced(**settings)


def load_for_finetuning(
    folder: Path, recipe: FinetuneRecipe, config: STMoEConfig, device_type: str = "cpu"
) -> BuiltModel:
    """Returns the model to fine-tune, on its device or mesh.

    Args:
        folder: A model saved by `save_pretrained`.
        recipe: `init` says whether weights are the folder's or fresh ones, drawn from `seed`.
        config: What `finetuning_config` returned.
        device_type: `cpu` or `cuda`.

    Raises:
        CheckpointError: When the weights of the folder are not complete.
    """
    if recipe.init == "scratch":
        return build_new_model(recipe, config, device_type)
    return load_pretrained_model(recipe, config, folder, device_type)


def remember_sentinels(
    model: STMoEForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, sentinels: Sentinels
) -> PreTrainedTokenizerFast:
    """Lets model and tokenizer, once saved, treat inputs as in fine-tuning, whoever uses them.

    With `one` the returned tokenizer puts the first sentinel at the end of every input, and the
    model begins every generation with it, by `generation_config.forced_bos_token_id`; decoding
    skips it as any special token. The tokenizer ends targets like inputs, though training put the
    sentinel before them: labels are made by `PairSource`.

    Args:
        model: Its generation settings are changed.
        tokenizer: Stays as it is.
        sentinels: `one` or `none`, as in the data.
    """
    assert model.generation_config is not None, "the model generates"
    has_sentinel = sentinels == "one"
    forced = SpecialIds.of(tokenizer).first_sentinel if has_sentinel else None
    model.generation_config.forced_bos_token_id = forced
    return end_with_sentinel(tokenizer, has_sentinel)
