"""Fine-tuning after the paper: the initial weights, the changed settings, and the data of a run.

`select_parameters` in moe/models/trainable_parameters.py chooses which parameters train.
"""

import dataclasses
from collections.abc import Collection
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerFast

from moe.checkpoint.loading import check_model_folder, find_class
from moe.checks import check
from moe.data.language_codes import answer_settings
from moe.data.pairs import Sentinels
from moe.data.tokenizer import (
    TOKENIZER,
    SpecialIds,
    end_with_sentinel,
    has_sentinels,
    load_tokenizer,
)
from moe.errors import CheckpointError, ConfigError
from moe.files import kind_of
from moe.models.adapter_files import find_base
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import refuse_quantized
from moe.models.inputs import check_reads_texts
from moe.models.modeling import STMoEForConditionalGeneration
from moe.training.recipe import FinetuneRecipe

R = TypeVar("R", bound=FinetuneRecipe)

SCORED_PAIRS = 500
"""Most of your own dev pairs that are answered at an evaluation, unless mixture.dev_examples is given."""

# Settings that belong to trained weights: the text that they have seen, and how they are stored.
_OF_WEIGHTS = ("noise_density", "mean_noise_span_length", "expert_quantization")

_DEV_EXAMPLES = "mixture.dev_examples"


def finetuning_overrides(**changes: Any) -> dict[str, Any]:
    """Returns the settings of a model that fine-tuning changes: the paper's dropout, and `changes`.

    They are those of a recipe's `model:` section. To turn the routers' losses off, give both
    weights as 0.

    Example:
        overrides = finetuning_overrides(capacity_factor=2.0, load_balance_loss_weight=0.0)
        model = STMoEForConditionalGeneration.from_pretrained(folder, **overrides)

    Args:
        changes: Fields of STMoEConfig that do not affect weights, e.g. `dropout_rate` (0.1),
            `expert_dropout_rate` (0.4), `capacity_factor`, `eval_capacity_factor`,
            `load_balance_loss_weight`; others keep the model's values.

    Raises:
        ConfigError: When a field is unknown or belongs to the architecture.

    Source:
        Switch (arXiv:2101.03961) table 4: dropout 0.1, inside experts 0.4. ST-MoE
        (arXiv:2202.08906) §4.4: the balance loss stays on, higher capacities do not help.
    """
    return dict(FinetuneRecipe(model=changes).model)


def choose_data(recipe: R, task: str | None, train: Path | None, typed: Collection[str]) -> R:
    """Returns the recipe with the tasks that the run trains on; no tasks for pairs of texts.

    Args:
        recipe: May name a mixture of tasks.
        task: The only task, or None.
        train: File of pairs, or None.
        typed: Names of the settings on the command line; they override the recipe's.

    Raises:
        ConfigError: When there is not exactly one source of data.
    """
    # Data given on the command line override the recipe's.
    options = {"task": task, "train": train, "mixture.tasks": recipe.mixture.tasks}
    given = [name for name, value in options.items() if value not in (None, [])]
    chosen = [name for name in given if name in typed] or given
    if len(chosen) != 1:
        sources = " and ".join(f"{name} {options[name]}" for name in chosen) or "nothing"
        raise ConfigError(
            f"{sources} given to train on; expected one of --task, --train and mixture.tasks."
        )

    mixture = recipe.mixture
    if chosen == ["train"]:
        dev_examples = mixture.dev_examples if _DEV_EXAMPLES in typed else SCORED_PAIRS
        mixture = dataclasses.replace(mixture, tasks=[], dev_examples=dev_examples)
    elif chosen == ["task"]:
        mixture = dataclasses.replace(mixture, tasks=[task])
    return dataclasses.replace(recipe, mixture=mixture)


def finetuning_config(folder: Path, recipe: FinetuneRecipe) -> Any:
    """Returns the configuration of a folder's model or host with the recipe's dropout and routing settings.

    For fresh weights a tokenizer is enough: the recipe then gives the architecture.

    Raises:
        CheckpointError: When there is no model in the folder.
        ConfigError: When a capacity factor has no effect because of the model's absolute capacity,
            or neither folder nor recipe gives the architecture.
    """
    if kind_of(folder) == TOKENIZER:
        if recipe.init != "scratch":
            raise CheckpointError(
                f"{folder} holds a tokenizer and no model. Give --init scratch for fresh weights, or a model's folder."
            )
        if "d_model" not in recipe.model:
            raise ConfigError(
                f"{folder} holds a tokenizer and no model, so the recipe must give the architecture, but model.d_model "
                "is missing. Choose a recipe such as names, or a folder with a model."
            )
        return STMoEConfig(**recipe.model, vocab_size=len(load_tokenizer(folder)))
    check_model_folder(folder)
    if find_base(folder) is not None:
        raise ConfigError(
            f"{folder} holds adapters, not a model. Merge them first: stmoe convert --from {folder} --to MODEL."
        )

    model_class = find_class(folder)
    if model_class is not STMoEForConditionalGeneration:
        return _host_config(model_class, folder, recipe)

    # With a capacity in slots, from the model or the recipe, a factor has no effect.
    config = STMoEConfig.from_pretrained(folder)
    idle = [name for name in ("capacity_factor", "eval_capacity_factor") if name in recipe.model]
    if idle and recipe.model.get("expert_capacity", config.expert_capacity) is not None:
        raise ConfigError(
            f"{' and '.join(idle)} would change nothing: the model in {folder} has expert_capacity "
            f"{config.expert_capacity}, which takes precedence. Set model.expert_capacity to null, too."
        )
    settings = dict(recipe.model)
    if recipe.init == "scratch":
        settings |= dict.fromkeys(_OF_WEIGHTS)
    return config.replaced(**settings)


def _host_config(model_class: Any, folder: Path, recipe: FinetuneRecipe) -> Any:
    """Returns the configuration of a host; settings of sparse layers are those of HostSettings."""
    check_reads_texts(model_class)
    config = model_class.config_class.from_pretrained(folder)
    refuse_quantized(config, "fine-tuned", folder)

    # Settings that only our models have.
    settings = dict(recipe.model)
    ours = {"balance_scope": "group", "z_loss_weight": 0.0, "label_smoothing": 0.0}
    given = {f"model.{name}": (settings.pop(name, value), value) for name, value in ours.items()}
    for name in ("init", "parameters", "optimizer_state", "data.pack", "data.sentinels"):
        given[name] = (attrgetter(name)(recipe), attrgetter(name)(FinetuneRecipe()))
    reason = f"since {folder} holds a {model_class.__name__}"
    for name, (value, default) in given.items():
        check(value == default, name, value, f"{default}, {reason}")

    _set_dropout(config, settings.pop("dropout_rate"))
    is_sparse = getattr(config, "sparse_layers", None) is not None
    return config.replaced(**settings) if is_sparse else config


def _set_dropout(config: Any, rate: float) -> None:
    """Sets the dropout of a host; all of its layers run in every step, as the metrics of routers need."""
    fields = {"dropout": rate, "dropout_rate": rate}
    fields |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    for name, value in fields.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name in config.sub_configs:
        _set_dropout(getattr(config, name), rate)


def remember_sentinels(
    model: STMoEForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, sentinels: Sentinels
) -> PreTrainedTokenizerFast:
    """Makes the saved model and tokenizer treat inputs as in fine-tuning.

    With `one` the returned tokenizer appends the first sentinel to every input, and the model starts
    every generation with it, by `generation_config.forced_bos_token_id`; decoding skips it like any
    special token. The tokenizer ends targets like inputs, although training puts the sentinel before
    them: labels are made by `PairSource`. A model whose tokenizer has no sentinels, but languages,
    answers in the tokenizer's target language.

    Args:
        model: Its generation settings are changed.
        tokenizer: Not changed.
        sentinels: `one` or `none`, as in the data.
    """
    assert model.generation_config is not None, "the model generates"
    if not has_sentinels(tokenizer):
        model.generation_config.update(**answer_settings(tokenizer))
        return tokenizer
    has_sentinel = sentinels == "one"
    forced = SpecialIds.of(tokenizer).first_sentinel if has_sentinel else None
    model.generation_config.forced_bos_token_id = forced
    return end_with_sentinel(tokenizer, has_sentinel)
