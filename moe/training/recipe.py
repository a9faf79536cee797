"""Recipes: all settings of a run as frozen records, checked when they are made.

command.py reads them from YAML files (recipe_files.py) and the command line.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from moe.checks import check, check_choice, check_field_types, check_integer, check_number
from moe.data.mixture import check_rates
from moe.data.pairs import Sentinels
from moe.data.span_corruption import Noise, check_noise
from moe.distributed.mesh import MeshConfig
from moe.errors import ConfigError, did_you_mean
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import refuse_quantized
from moe.models.trainable_parameters import check_subset
from moe.optim.schedules import Schedule
from moe.training.optim_recipe import OptimRecipe

Precision = Literal["float32", "bfloat16"]
Init = Literal["pretrained", "scratch"]
OptimizerState = Literal["reset", "keep"]

# Fields that STMoEConfig itself defines, except those that no recipe's `model` may set.
_NOT_SETTINGS = {
    "use_cache",
    "is_encoder_decoder",
    "output_router_logits",
    "noise_density",  # set from `data`
    "mean_noise_span_length",
}
_ARCHITECTURE = {
    item.name: item.default
    for item in dataclasses.fields(STMoEConfig)
    if item.name in STMoEConfig.__annotations__ and item.name not in _NOT_SETTINGS
}


@dataclass(frozen=True)
class TrainingRecipe:
    """Length of a run, its batches, and how often it logs, evaluates and saves.

    Attributes:
        steps: Updates in the whole run.
        batch_size: Sequences in an update.
        micro_batch_size: Sequences in a forward pass of one rank; fewer need less memory, without
            changing results. Null for all.
        precision: `bfloat16` computes in autocast; parameters, router and losses stay float32. On a
            mesh parameters are exchanged in bfloat16, gradients in float32.
        activation_checkpointing: Whether a block keeps only its input and runs again in the
            backward pass.
        compile: Whether to use `torch.compile`: a step of a small model takes a fifth less time on a
            CPU with a C++ compiler, after a minute of compilation; results differ by rounding.
        log_every: Steps between lines of metrics.
        evaluate_every: Steps between held-out evaluations.
        held_out_batches: Batches in a held-out evaluation; 0 disables it.
        checkpoint_every: Steps between checkpoints; a crash loses at most this many.
        keep_checkpoints: Number of newest checkpoints to keep.
    """

    steps: int = 100_000
    batch_size: int = 128
    micro_batch_size: int | None = None
    precision: Precision = "float32"
    activation_checkpointing: bool = False
    compile: bool = False
    log_every: int = 10
    evaluate_every: int = 1_000
    held_out_batches: int = 8
    checkpoint_every: int = 1_000
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        check_field_types(self, prefix="training.")

        for name in (
            "steps",
            "log_every",
            "evaluate_every",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            check_integer(f"training.{name}", getattr(self, name), least=1)
        check_integer("training.held_out_batches", self.held_out_batches, least=0)

        # Micro-batches share the rows of an update evenly.
        rows = self.batch_size
        check_integer("training.batch_size", rows, least=1)
        micro_rows = self.micro_batch_size
        name = "training.micro_batch_size"
        check_integer(name, micro_rows, least=1, optional="null for all rows at once")
        divides = micro_rows is None or rows % micro_rows == 0
        check(divides, name, micro_rows, f"a divisor of training.batch_size, {rows}, or null")


@dataclass(frozen=True)
class SpanCorruptionRecipe:
    """How pre-training examples are built from text: T5's span corruption.

    Attributes:
        inputs_length: Encoder tokens of an example with sentinels and end; the targets' length
            follows.
        noise_density: Share of tokens that are masked.
        mean_noise_span_length: Mean length of a masked span in tokens.
        short_steps: First steps of a run, in which a row holds several short examples instead of a
            long one; see moe/data/pipeline.py. 0 for none.
        short_inputs_length: Encoder tokens of a short example; needed with `short_steps`.
        rates: Relative number of examples from each corpus, in the order of `--corpus`; null for a
            single one.

    Source:
        ST-MoE (arXiv:2202.08906) §6.1: 512 and 114 tokens; T5's span corruption.
    """

    inputs_length: int = 512
    noise_density: float = 0.15
    mean_noise_span_length: float = 3.0
    short_steps: int = 0
    short_inputs_length: int | None = None
    rates: list[float] | None = None

    def __post_init__(self) -> None:
        is_list = self.rates is None or isinstance(self.rates, list)
        check(is_list, "data.rates", self.rates, "a list of numbers, or null")
        for rate in self.rates or ():
            check_number("data.rates", rate, above=0)
        check_integer("data.short_steps", self.short_steps, least=0)
        length = self.inputs_length
        check_integer("data.inputs_length", length, least=4)
        check_noise(Noise(self.noise_density, self.mean_noise_span_length), prefix="data.")

        # Short examples come with their length.
        name = "data.short_inputs_length"
        short = self.short_inputs_length
        optional = "null without data.short_steps"
        check_integer(
            name, short, least=4, most=length, reason="a row holds several", optional=optional
        )
        expected = (
            f"null without data.short_steps, else a length; short_steps is {self.short_steps}"
        )
        check((short is not None) == (self.short_steps > 0), name, short, expected)


@dataclass(frozen=True)
class PairsRecipe:
    """How fine-tuning rows are built from pairs: an input text and a target text.

    Attributes:
        inputs_length: Encoder tokens of a row; longer inputs are truncated.
        targets_length: Decoder tokens of a row; longer targets are truncated.
        pack: Whether several examples share a row; they do not see each other.
        sentinels: `one` ends every input and starts every target with the first sentinel, as in
            pre-training; the saved model and tokenizer do so, too. `none` leaves texts unchanged.

    Source:
        ST-MoE (arXiv:2202.08906) §4.5: a sentinel trains faster but is not better in general.
    """

    inputs_length: int = 512
    targets_length: int = 114
    pack: bool = False
    sentinels: Sentinels = "none"

    def __post_init__(self) -> None:
        check_field_types(self, prefix="data.")
        for name in ("inputs_length", "targets_length"):
            length = getattr(self, name)
            check_integer(f"data.{name}", length, least=2)


@dataclass(frozen=True)
class MixtureRecipe:
    """Tasks to fine-tune on together, their number of training examples, and their dev evaluation.

    Attributes:
        tasks: Names of tasks of eval/; none for your own pairs of texts.
        folder: Folder with a subfolder of rows named after each task; null for the tasks' own
            sources on the hub.
        train_examples: Maximum number of training examples of each task, a random subset drawn by
            the run's seed; smaller subsets are contained in larger ones. Null for all.
        maximum: Cap on a task's number of training examples, to which its share is proportional;
            null for no cap.
        temperature: The capped number is raised to the power 1 / temperature: values above 1 make
            the tasks' shares more equal.
        dev_examples: Maximum number of examples of each task's dev split that are answered by
            generation at every evaluation, to keep the best model as well as the last; null for
            all, 0 disables it.

    Source:
        ST-MoE (arXiv:2202.08906) §6.1: proportional to the examples, at most 65,536 a task; T5
        (arXiv:1910.10683) §3.5.2 for the temperature.
    """

    tasks: list[str] = field(default_factory=list)
    folder: str | None = None
    train_examples: int | None = None
    maximum: int | None = 65_536
    temperature: float = 1.0
    dev_examples: int | None = 0

    def __post_init__(self) -> None:
        # Only the type of names is checked: eval/, which defines the tasks, is not imported here.
        tasks = self.tasks
        are_names = isinstance(tasks, list) and all(
            isinstance(name, str) and name for name in tasks
        )
        check(are_names, "mixture.tasks", tasks, "a list of names of tasks")
        repeated = sorted({name for name in tasks if tasks.count(name) > 1})
        once = f"every task once; {', '.join(repeated)} is repeated"
        check(not repeated, "mixture.tasks", tasks, once)

        folder = self.folder
        is_path = folder is None or (isinstance(folder, str) and bool(folder.strip()))
        expected = "the path of a folder, or null for the tasks' own sources"
        check(is_path, "mixture.folder", folder, expected)

        name = "mixture.train_examples"
        check_integer(name, self.train_examples, least=1, optional="null for all")
        check_rates(self.maximum, self.temperature)
        check_integer("mixture.dev_examples", self.dev_examples, least=0, optional="null for all")


@dataclass(frozen=True)
class Recipe:
    """The settings of every run; `PretrainRecipe` and `FinetuneRecipe` add their data.

    Attributes:
        seed: All randomness of the run is a function of it and the step.
        model: Fields of STMoEConfig.
        optim: Optimizer and schedule.
        training: Length, batches, and how often the run logs, evaluates and saves.
        mesh: Mesh of the ranks that torchrun starts.

    Raises:
        ConfigError: When a value is out of range, unknown, or contradicts another.
    """

    model_defaults: ClassVar[Mapping[str, Any]] = _ARCHITECTURE
    """Defaults of model fields; fields without a default keep the model's value."""
    model_fields: ClassVar[frozenset[str]] = frozenset(_ARCHITECTURE)
    """Model fields that a recipe of this kind may set."""

    seed: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, least=0, most=2**32 - 1, reason="it has 32 bits")

        # Settings of the model, checked by name here and by value in STMoEConfig.
        is_mapping = isinstance(self.model, Mapping)
        check(is_mapping, "model", self.model, "a mapping of settings of the model")
        for name in self.model:
            if name not in self.model_fields:
                raise ConfigError(
                    f"model.{name} is not a setting of {type(self).__name__}.{did_you_mean(name, self.model_fields)} "
                    f"Known: {', '.join(sorted(self.model_fields))}."
                )
        object.__setattr__(self, "model", {**self.model_defaults, **self.model})

        # Sections are records of the type of their field.
        for item in dataclasses.fields(self):
            if item.default_factory is not dataclasses.MISSING and item.name != "model":
                kind = type(item.default_factory())
                section = getattr(self, item.name)
                check(isinstance(section, kind), item.name, section, f"a {kind.__name__}")

        # Settings that contradict each other.
        self.build_schedule()
        rows = self.training.batch_size
        micro_rows = self.training.micro_batch_size or 1
        data_ranks = self.mesh.num_data_ranks
        multiple = data_ranks * micro_rows
        if rows % multiple:
            raise ConfigError(
                f"training.batch_size is {rows}; expected a multiple of {multiple}: {data_ranks} data ranks "
                f"({self.mesh}) with micro-batches of {micro_rows}. Choose another batch size or mesh."
            )

    def build_schedule(self) -> Schedule:
        """Returns the learning rate as a function of the step.

        Raises:
            ConfigError: When the cooldown is longer than the run, or a setting of the schedule is
                impossible.
        """
        return self.optim.schedule_for(self.training.steps)


@dataclass(frozen=True)
class PretrainRecipe(Recipe):
    """Pre-training by span corruption; defaults are the paper's.

    Attributes:
        data: How examples are built from text.
    """

    data: SpanCorruptionRecipe = field(default_factory=SpanCorruptionRecipe)

    def build_config(self) -> STMoEConfig:
        """Returns the model's configuration.

        Raises:
            ConfigError: When its numbers contradict each other, or experts are quantized.
        """
        config = STMoEConfig(
            **self.model,
            noise_density=self.data.noise_density,
            mean_noise_span_length=self.data.mean_noise_span_length,
        )
        refuse_quantized(config, "pre-trained")
        return config


# Settings of a model that change neither number nor shape of its weights.
SETTINGS_WITHOUT_WEIGHTS = frozenset(
    {
        # Dropout.
        "dropout_rate",
        "expert_dropout_rate",
        # Routing: capacity, groups, and options of the routers.
        "capacity_factor",
        "eval_capacity_factor",
        "convention",
        "expert_capacity",
        "min_expert_capacity",
        "group_size",
        "num_selected_experts",
        "router_options",
        "decoder_router_options",
        # Settings of the routers' losses, and of the exchange of rows.
        "balance_scope",
        "dispatch",
        # Weights of the losses.
        "load_balance_loss_weight",
        "router_z_loss_weight",
        "z_loss_weight",
        "label_smoothing",
    }
)


@dataclass(frozen=True)
class LoraRecipe:
    """Low-rank adapters that train with `parameters: lora`; see `lora_config`.

    Attributes:
        experts: Whether every expert gets adapters, on both of its products.
        attention: Whether queries, keys, values and outputs of all attention get them.
        rank: Inner width of an adapter; more trains more parameters.
        alpha: An adapter's product is scaled by alpha / rank.
        dropout: Share of an adapter's inputs that is set to zero in training.

    Source:
        LoRA (arXiv:2106.09685) §4.1.
    """

    experts: bool = True
    attention: bool = True
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_field_types(self, prefix="lora.")
        check(self.experts or self.attention, "lora.experts", False, "true, or lora.attention true")
        check_integer("lora.rank", self.rank, least=1)
        check_number("lora.alpha", self.alpha, above=0)
        check_number("lora.dropout", self.dropout, least=0, below=1)


_FINETUNE_OPTIM = OptimRecipe(schedule="constant", lr=1e-3, warmup_steps=1_000)


@dataclass(frozen=True)
class FinetuneRecipe(Recipe):
    """Fine-tuning on pairs of texts; defaults are the paper's.

    The architecture comes from the initial model. With its weights only `SETTINGS_WITHOUT_WEIGHTS`
    can be changed; from scratch every setting except the vocabulary's size, and with a tokenizer
    alone the recipe gives the whole architecture.

    Attributes:
        init: `pretrained` starts from the model's weights, `scratch` from fresh ones of the same
            architecture.
        parameters: Parameters that train, e.g. `attention` or `lora`; others are `all`, `non_moe`, `moe`,
            `new_experts`, `ffn` and `router_frozen`, see `select_parameters`.
        lora: The adapters that train with `lora`, which alone are then saved.
        optimizer_state: `keep` starts with the optimizer's state (its slots) from the pre-training
            run, whose checkpoints must be next to the model's folder, and is better in the paper;
            `reset` starts without and needs only the model. The schedule restarts either way.
        mixture: The tasks, and how often each is drawn.
        data: How rows are built from pairs.

    Source:
        ST-MoE (arXiv:2202.08906) §5 and T5X's MoE fine-tuning: constant rate 1e-3 after 1,000
        steps, 128 sequences, dropout 0.1; Switch (arXiv:2101.03961) §4.2: expert dropout 0.4.
    """

    model_defaults: ClassVar[Mapping[str, Any]] = {"dropout_rate": 0.1, "expert_dropout_rate": 0.4}
    model_fields: ClassVar[frozenset[str]] = frozenset(_ARCHITECTURE.keys() - {"vocab_size"})

    init: Init = "pretrained"
    parameters: str = "all"
    lora: LoraRecipe = field(default_factory=LoraRecipe)
    optimizer_state: OptimizerState = "reset"
    optim: OptimRecipe = field(default_factory=lambda: _FINETUNE_OPTIM)
    mixture: MixtureRecipe = field(default_factory=MixtureRecipe)
    data: PairsRecipe = field(default_factory=PairsRecipe)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("init", self.init, get_args(Init))

        # Trained weights fit one architecture.
        changed = sorted(self.model.keys() - SETTINGS_WITHOUT_WEIGHTS)
        if changed and self.init == "pretrained":
            names = ", ".join(f"model.{name}" for name in changed)
            raise ConfigError(
                f"{names} would change the weights of the initial model. Leave it out, or train fresh weights: "
                "init scratch."
            )

        is_text = isinstance(self.parameters, str)
        check(is_text, "parameters", self.parameters, "the name of a subset")
        check_subset(self.parameters)

        # Fresh weights have no optimizer state to keep.
        state = self.optimizer_state
        check_choice("optimizer_state", state, get_args(OptimizerState))
        goes_with_init = state == "reset" or self.init == "pretrained"
        check(goes_with_init, "optimizer_state", state, "reset, since init is scratch")

        adapts = self.parameters == "lora"
        check(adapts or self.lora == LoraRecipe(), "lora", self.lora, "parameters lora with it")
        if self.parameters in ("lora", "new_experts"):
            expected = f"pretrained, for {self.parameters}"
            check(self.init == "pretrained", "init", self.init, expected)

        # Without these, the other experts would change, too.
        if self.parameters == "new_experts":
            check(state == "reset", "optimizer_state", state, "reset, for new_experts")
            decay = self.optim.weight_decay
            check(decay == 0, "optim.weight_decay", decay, "0, for new_experts")
            num_ranks = self.mesh.num_ranks
            check(num_ranks == 1, "The ranks of the mesh", num_ranks, "1, for new_experts")
