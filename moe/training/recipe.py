"""What a run is: frozen records, checked when they are made. Read from YAML and the command line by command.py."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from moe.data.mixture import check_rates
from moe.data.pipeline import Sentinels
from moe.distributed.mesh import MeshConfig
from moe.errors import ConfigError, did_you_mean
from moe.models.configuration import STMoEConfig
from moe.models.subsets import check_subset
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.schedules import SCHEDULES, Schedule, with_cooldown

Precision = Literal["float32", "bfloat16"]
Slots = Literal["reset", "keep"]

_NOT_SETTINGS = {"use_cache", "is_encoder_decoder", "output_router_logits"}
_ARCHITECTURE = {
    item.name: item.default
    for item in dataclasses.fields(STMoEConfig)
    if item.name in STMoEConfig.__annotations__ and item.name not in _NOT_SETTINGS
}


def _expect(holds: bool, name: str, value: object, expected: str) -> None:
    """Raises a ConfigError that names the setting, its value and what was expected, unless `holds`."""
    if not holds:
        raise ConfigError(f"{name} is {value!r}; expected {expected}.")


@dataclass(frozen=True)
class OptimRecipe:
    """The optimizer and its learning rate.

    Attributes:
        optimizer: `adafactor` (the paper's) or `adamw`, whose rate is absolute.
        schedule: Shape of the learning rate: `rsqrt` (constant, then 1 / sqrt(step)) or `constant`.
        lr: Rate relative to RMS(parameter); for `rsqrt` the numerator, so that the peak is lr / sqrt(warmup_steps).
        warmup_steps: Steps of constant (`rsqrt`) or linearly rising rate (`constant`).
        cooldown_steps: Last steps, over which the rate falls linearly to zero.
        clipping_threshold: Largest RMS of a parameter's update before lr, for adafactor; the paper loses quality
            with 0.1.
        weight_decay: Share of lr by which adamw shrinks weights.
        max_grad_norm: Gradients are scaled down to this global norm; None leaves them.
    """

    optimizer: str = "adafactor"
    schedule: str = "rsqrt"
    lr: float = 1.0
    warmup_steps: int = 10_000
    cooldown_steps: int = 0
    clipping_threshold: float = 1.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        OPTIMIZERS.get(self.optimizer)
        SCHEDULES.get(self.schedule)
        _expect(0 < self.lr < math.inf, "optim.lr", self.lr, "a finite number above 0")
        _expect(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "0 or more")
        _expect(self.cooldown_steps >= 0, "optim.cooldown_steps", self.cooldown_steps, "0 or more")
        _expect(self.clipping_threshold > 0, "optim.clipping_threshold", self.clipping_threshold, "above 0")
        _expect(0 <= self.weight_decay < math.inf, "optim.weight_decay", self.weight_decay, "a finite number from 0")
        norm = self.max_grad_norm
        _expect(norm is None or norm > 0, "optim.max_grad_norm", norm, "a number above 0, or null")


@dataclass(frozen=True)
class TrainingRecipe:
    """Length, batches and rhythm of a run.

    Attributes:
        steps: Updates in the whole run.
        batch_size: Sequences in an update.
        micro_batch_size: Sequences in a forward pass of one rank; less needs less memory and changes no result. Null
            for all.
        precision: `bfloat16` computes in autocast; parameters, router and losses stay float32. On a mesh parameters
            travel in bfloat16, gradients in float32.
        activation_checkpointing: Whether a block keeps only its input and runs again in the backward pass.
        log_every: Steps from one line of metrics to the next.
        evaluate_every: Steps from one held-out evaluation to the next.
        held_out_batches: Batches in a held-out evaluation; 0 for no evaluation.
        checkpoint_every: Steps from one checkpoint to the next: what a crash may cost.
        keep_checkpoints: Newest checkpoints that stay on disk.
    """

    steps: int = 100_000
    batch_size: int = 128
    micro_batch_size: int | None = None
    precision: Precision = "float32"
    activation_checkpointing: bool = False
    log_every: int = 10
    evaluate_every: int = 1_000
    held_out_batches: int = 8
    checkpoint_every: int = 1_000
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        at_least_one = ("steps", "batch_size", "log_every", "evaluate_every", "checkpoint_every", "keep_checkpoints")
        for name in at_least_one:
            _expect(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), "at least 1")
        _expect(self.held_out_batches >= 0, "training.held_out_batches", self.held_out_batches, "0 or more")
        choices = ("float32", "bfloat16")
        _expect(self.precision in choices, "training.precision", self.precision, f"one of {', '.join(choices)}")
        micro = self.micro_batch_size
        _expect(
            micro is None or (micro >= 1 and self.batch_size % micro == 0),
            "training.micro_batch_size",
            micro,
            f"a divisor of training.batch_size, {self.batch_size}, or null",
        )


@dataclass(frozen=True)
class SpanCorruptionRecipe:
    """Pre-training examples.

    Attributes:
        inputs_length: Encoder tokens of an example with sentinels and end; the targets' length follows.
        noise_density: Share of tokens that are masked.
        mean_noise_span_length: Mean length of a masked span in tokens.

    Source:
        ST-MoE (arXiv:2202.08906) §6.1: 512 and 114 tokens; T5's span corruption.
    """

    inputs_length: int = 512
    noise_density: float = 0.15
    mean_noise_span_length: float = 3.0

    def __post_init__(self) -> None:
        _expect(self.inputs_length >= 4, "data.inputs_length", self.inputs_length, "at least 4")
        _expect(0 < self.noise_density < 1, "data.noise_density", self.noise_density, "between 0 and 1")
        span = self.mean_noise_span_length
        _expect(span >= 1, "data.mean_noise_span_length", span, "at least 1")


@dataclass(frozen=True)
class PairsRecipe:
    """Fine-tuning examples: texts in, texts out.

    Attributes:
        inputs_length: Encoder tokens of a row; longer inputs are cut.
        targets_length: Decoder tokens of a row; longer targets are cut.
        pack: Whether several examples share a row; they do not see each other.
        sentinels: `one` ends every input and begins every target with the first sentinel, as pre-training does; the
            saved model and tokenizer do the same by themselves. `none` leaves the texts alone.

    Source:
        ST-MoE (arXiv:2202.08906) §4.5: a sentinel trains faster and is no better in general.
    """

    inputs_length: int = 512
    targets_length: int = 114
    pack: bool = False
    sentinels: Sentinels = "none"

    def __post_init__(self) -> None:
        _expect(self.sentinels in ("none", "one"), "data.sentinels", self.sentinels, "one of none, one")
        _expect(self.inputs_length >= 2, "data.inputs_length", self.inputs_length, "at least 2")
        _expect(self.targets_length >= 2, "data.targets_length", self.targets_length, "at least 2")


@dataclass(frozen=True)
class MixtureRecipe:
    """Tasks to fine-tune on together, and what of them the run is measured on.

    Attributes:
        tasks: Names of tasks of eval/; none for pairs of texts of your own.
        folder: Holds a folder of rows for each task, called as the task is; null for the tasks' own sources, the hub.
        maximum: Cap of a task's number of training examples, to which its share is proportional; null for no cap.
        temperature: The capped number counts as its power of 1 / temperature: more than 1 evens the tasks out.
        dev_examples: Most examples of each task's dev split that are answered by generation at every evaluation, so
            that the best model stays beside the last; null for all, 0 for no such evaluation.

    Source:
        ST-MoE (arXiv:2202.08906) §6.1: proportional to the examples, at most 65,536 a task; T5 (arXiv:1910.10683)
        §3.5.2 for the temperature.
    """

    tasks: list[str] = field(default_factory=list)
    folder: str | None = None
    maximum: int | None = 65_536
    temperature: float = 1.0
    dev_examples: int | None = 0

    def __post_init__(self) -> None:
        check_rates(self.maximum, self.temperature)
        repeated = sorted({name for name in self.tasks if self.tasks.count(name) > 1})
        _expect(not repeated, "mixture.tasks", self.tasks, f"every task once; {', '.join(repeated)} is repeated")
        limit = self.dev_examples
        _expect(limit is None or limit >= 0, "mixture.dev_examples", limit, "0 or more, or null for all")


@dataclass(frozen=True)
class Recipe:
    """What every run has; `PretrainRecipe` and `FinetuneRecipe` add their data.

    Attributes:
        seed: All randomness of the run is a function of it and the step.
        model: Fields of STMoEConfig.
        optim: Optimizer and schedule.
        training: Length, batches and rhythm.
        mesh: Ranks that the run is spread over, as torchrun starts them.

    Raises:
        ConfigError: When a value is out of range, unknown, or contradicts another.
    """

    model_defaults: ClassVar[Mapping[str, Any]] = _ARCHITECTURE
    """Value of each model field that the recipe does not give; fields without one stay as the model has them."""
    model_fields: ClassVar[frozenset[str]] = frozenset(_ARCHITECTURE)
    """Model fields that a recipe of this kind may give."""

    seed: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        _expect(0 <= self.seed < 2**32, "seed", self.seed, f"0 to {2**32 - 1}")
        for name in self.model:
            if name not in self.model_fields:
                raise ConfigError(
                    f"model.{name} is no setting of a {type(self).__name__}."
                    f"{did_you_mean(name, self.model_fields)} Known: {', '.join(sorted(self.model_fields))}."
                )
        object.__setattr__(self, "model", {**self.model_defaults, **self.model})
        self.build_schedule()
        rows, micro = self.training.batch_size, self.training.micro_batch_size or 1
        parts = self.mesh.num_data_ranks * micro
        if rows % parts:
            raise ConfigError(
                f"training.batch_size is {rows}; expected a multiple of {parts}: {self.mesh.num_data_ranks} data ranks "
                f"({self.mesh}) with micro-batches of {micro}. Choose another batch size or mesh."
            )

    def build_schedule(self) -> Schedule:
        """Returns the learning rate as a function of the step.

        Raises:
            ConfigError: When the cooldown is longer than the run.
        """
        optim = self.optim
        schedule = SCHEDULES.get(optim.schedule)(lr=optim.lr, warmup_steps=optim.warmup_steps)
        return with_cooldown(schedule, total_steps=self.training.steps, cooldown_steps=optim.cooldown_steps)


@dataclass(frozen=True)
class PretrainRecipe(Recipe):
    """Pre-training by span corruption; defaults are the paper's.

    Attributes:
        data: How examples are made of text.
    """

    data: SpanCorruptionRecipe = field(default_factory=SpanCorruptionRecipe)

    def build_config(self) -> STMoEConfig:
        """Returns the model's configuration.

        Raises:
            ConfigError: When its numbers contradict each other.
        """
        return STMoEConfig(**self.model)


_FINETUNE_OPTIM = OptimRecipe(schedule="constant", lr=1e-3, warmup_steps=1_000)


@dataclass(frozen=True)
class FinetuneRecipe(Recipe):
    """Fine-tuning on pairs of texts; defaults are the paper's.

    The model's architecture is that of the model it starts from: only settings without weights can be given.

    Attributes:
        init: `pretrained` starts from the model's weights, `scratch` from fresh ones of the same architecture.
        parameters: What trains: `all`, `non_moe`, `moe`, `attention`, `ffn` or `router_frozen`; see
            `select_parameters`.
        optimizer_slots: `keep` starts with the optimizer's state of the pre-training run, whose checkpoints lie beside
            the model's folder, and is better in the paper; `reset` starts with none and needs the model alone. The
            schedule begins anew either way.
        mixture: The tasks, and how often each is drawn.
        data: How rows are made of pairs.

    Source:
        ST-MoE (arXiv:2202.08906) §5 and T5X's MoE fine-tuning: constant rate 1e-3 after 1,000 steps, 128 sequences,
        dropout 0.1; Switch (arXiv:2101.03961) §4.2: expert dropout 0.4.
    """

    model_defaults: ClassVar[Mapping[str, Any]] = {"dropout_rate": 0.1, "expert_dropout_rate": 0.4}
    model_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "dropout_rate",
            "expert_dropout_rate",
            "capacity_factor",
            "eval_capacity_factor",
            "expert_capacity",
            "capacity_scope",
            "min_expert_capacity",
            "group_size",
            "capacity_rounding",
            "num_selected_experts",
            "router_options",
            "decoder_router_options",
            "balance_choices",
            "balance_over",
            "balance_scope",
            "router_z_loss_over",
            "dispatch",
            "load_balance_loss_weight",
            "router_z_loss_weight",
            "router_loss_reduction",
            "z_loss_weight",
            "label_smoothing",
        }
    )

    init: Literal["pretrained", "scratch"] = "pretrained"
    parameters: str = "all"
    optimizer_slots: Slots = "reset"
    optim: OptimRecipe = field(default_factory=lambda: _FINETUNE_OPTIM)
    mixture: MixtureRecipe = field(default_factory=MixtureRecipe)
    data: PairsRecipe = field(default_factory=PairsRecipe)

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect(self.init in ("pretrained", "scratch"), "init", self.init, "one of pretrained, scratch")
        check_subset(self.parameters)
        slots = self.optimizer_slots
        _expect(slots in ("reset", "keep"), "optimizer_slots", slots, "one of reset, keep")
        _expect(slots == "reset" or self.init == "pretrained", "optimizer_slots", slots, "reset, since init is scratch")
