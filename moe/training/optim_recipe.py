"""The optimizer and learning rate of a recipe; a section of the recipes in recipe.py."""

from dataclasses import dataclass, field
from typing import Any, Literal

from moe.checks import check, check_integer, check_number
from moe.errors import ConfigError
from moe.optim.optimizers import OPTIMIZERS, check_optimizer
from moe.optim.options import check_options, option_names
from moe.optim.schedules import LR_SCALINGS, SCHEDULES, Schedule, scaled_rate, with_cooldown

LrScaling = Literal["linear", "sqrt"]

MOST_STEPS = 99_999_999
WHY_MOST_STEPS = "checkpoints are numbered with eight digits"
_HIGHEST_RATE = 1e6
_WHY_HIGHEST_RATE = "a step of adafactor changes a parameter by this share of itself"

# Keywords of schedules for which recipes have their own keys.
_SCHEDULE_KEYS = frozenset({"lr", "warmup_steps", "total_steps"})


@dataclass(frozen=True)
class OptimRecipe:
    """The optimizer and its learning rate.

    Attributes:
        optimizer: `adafactor` (the paper's), `adamw` or `muon`, whose rates are absolute, or for
            large batches `lamb` or `lars`, whose rates are relative to the norm of each matrix.
        optimizer_options: Settings of that optimizer only, by name; see moe/optim/optimizers.py.
        schedule: Shape of the learning rate: `rsqrt` (constant, then 1 / sqrt(step)), `constant`,
            `linear`, `polynomial` or `exponential`.
        schedule_options: Settings of that schedule only, by name; see moe/optim/schedules.py. A
            length in steps such as decay_steps may be given in epochs as decay_epochs.
        lr: Rate relative to RMS(parameter); for `rsqrt` the numerator, so that the highest rate is
            lr / sqrt(warmup_steps).
        lr_scaling: Growth of the rate with the batch size relative to base_batch_size: `linear`, or
            `sqrt` for the square root; null for no scaling.
        base_batch_size: Sequences in an update for which lr was tuned.
        warmup_steps: Steps of constant (`rsqrt`) or linearly rising rate (the others).
        warmup_epochs: The same in epochs, instead of warmup_steps; null for none.
        epoch_examples: Sequences in an epoch.
        cooldown_steps: Last steps, over which the rate falls linearly to zero. A recipe file's value keeps its share of
            the run if only training.steps is changed.
        clipping_threshold: Largest RMS of a parameter's update before lr, for adafactor; the paper
            reports lower quality with 0.1.
        weight_decay: Share of lr by which all optimizers but adafactor shrink weights.
        max_grad_norm: Gradients are scaled down to this global norm; None leaves them.
    """

    optimizer: str = "adafactor"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    schedule: str = "rsqrt"
    schedule_options: dict[str, Any] = field(default_factory=dict)
    lr: float = 1.0
    lr_scaling: LrScaling | None = None
    base_batch_size: int | None = None
    warmup_steps: int = 10_000
    warmup_epochs: float | None = None
    epoch_examples: int | None = None
    cooldown_steps: int = 0
    clipping_threshold: float = 1.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        # An unknown name raises with the closest one.
        OPTIMIZERS.get(self.optimizer)
        SCHEDULES.get(self.schedule)

        check_number("optim.lr", self.lr, above=0, most=_HIGHEST_RATE, reason=_WHY_HIGHEST_RATE)
        for name in ("warmup_steps", "cooldown_steps"):
            steps = getattr(self, name)
            check_integer(f"optim.{name}", steps, least=0, most=MOST_STEPS, reason=WHY_MOST_STEPS)
        check_number("optim.clipping_threshold", self.clipping_threshold, above=0)
        check_number("optim.weight_decay", self.weight_decay, least=0)
        unclipped = "null to leave gradients as they are"
        check_number("optim.max_grad_norm", self.max_grad_norm, above=0, optional=unclipped)

        # Lengths in epochs.
        in_steps = "null for warmup_steps"
        check_number("optim.warmup_epochs", self.warmup_epochs, least=0, optional=in_steps)
        without = "null where nothing is in epochs"
        check_integer("optim.epoch_examples", self.epoch_examples, least=1, optional=without)

        # lr_scaling and base_batch_size must be set together.
        scaling = self.lr_scaling
        base = self.base_batch_size
        is_rule = scaling is None or (isinstance(scaling, str) and scaling in LR_SCALINGS)
        rules = f"{', '.join(LR_SCALINGS)}, or null for a rate as it is"
        check(is_rule, "optim.lr_scaling", scaling, rules)
        without = "null without optim.lr_scaling"
        check_integer("optim.base_batch_size", base, least=1, optional=without)
        expected = f"a batch size for lr_scaling {scaling}" if scaling else without
        check((base is None) == (scaling is None), "optim.base_batch_size", base, expected)

        # The optimizer checks its own options.
        for name in ("optimizer_options", "schedule_options"):
            options = getattr(self, name)
            check(isinstance(options, dict), f"optim.{name}", options, "a mapping of options")
        check_optimizer(
            self.optimizer,
            clipping_threshold=self.clipping_threshold,
            weight_decay=self.weight_decay,
            options=self.optimizer_options,
        )

    def schedule_for(self, batch_size: int, total_steps: int) -> Schedule:
        """Returns the learning rate as a function of the step.

        Args:
            batch_size: Sequences in an update.
            total_steps: Updates in the run.

        Raises:
            ConfigError: When an option is unknown or out of range, or a length in epochs is too long.
        """
        lr = self.lr
        if self.lr_scaling is not None and self.base_batch_size is not None:
            lr = scaled_rate(
                lr,
                batch_size=batch_size,
                base_batch_size=self.base_batch_size,
                scaling=self.lr_scaling,
            )
            name = f"optim.lr, by lr_scaling {self.lr_scaling} from base_batch_size,"
            check_number(name, lr, above=0, most=_HIGHEST_RATE, reason=_WHY_HIGHEST_RATE)

        # Lengths in epochs become steps of this batch.
        make = SCHEDULES.get(self.schedule)
        warmup_steps: float = self.warmup_steps
        if self.warmup_epochs is not None:
            warmup_steps = self._steps("optim.warmup_epochs", self.warmup_epochs, batch_size)
        options = self._options_in_steps(option_names(make, _SCHEDULE_KEYS), batch_size)

        # Schedules that need the length of the run have a keyword for it.
        place = "optim.schedule_options"
        check_options(place, self.schedule, make, options, _SCHEDULE_KEYS)
        settings: dict[str, Any] = {"lr": lr, "warmup_steps": warmup_steps, **options}
        if "total_steps" in option_names(make, ()):
            settings["total_steps"] = total_steps
        try:
            schedule = make(**settings)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        return with_cooldown(schedule, total_steps=total_steps, cooldown_steps=self.cooldown_steps)

    def _options_in_steps(self, known: list[str], batch_size: int) -> dict[str, Any]:
        """Returns the options of the schedule with lengths in steps."""
        has_epochs = self.warmup_epochs is not None
        options: dict[str, Any] = {}
        for name, value in self.schedule_options.items():
            in_steps = f"{str(name).removesuffix('_epochs')}_steps"
            if str(name).endswith("_epochs") and in_steps in known:
                if in_steps in self.schedule_options:
                    raise ConfigError(
                        f"optim.schedule_options has {in_steps} and {name}, which set the same duration. Keep one of "
                        "them."
                    )
                place = f"optim.schedule_options.{name}"
                options[in_steps] = self._steps(place, value, batch_size)
                has_epochs = True
            else:
                options[name] = value

        expected = "null, since nothing is in epochs: neither warmup_epochs nor a decay_epochs"
        is_used = has_epochs or self.epoch_examples is None
        check(is_used, "optim.epoch_examples", self.epoch_examples, expected)
        return options

    def _steps(self, name: str, epochs: Any, batch_size: int) -> float:
        """Returns the number of steps in a number of epochs."""
        if self.epoch_examples is None:
            raise ConfigError(
                f"{name} is in epochs, but optim.epoch_examples is null. Set it to the number of sequences in an "
                "epoch."
            )
        check_number(name, epochs, least=0)
        steps = epochs * self.epoch_examples / batch_size
        check_number(f"{name}, in steps,", steps, most=MOST_STEPS, reason=WHY_MOST_STEPS)
        return steps


def optim_options(key: str) -> set[str]:
    """Returns the options of all optimizers or schedules; none for another key of a recipe."""
    names: set[str] = set()
    if key == "optim.optimizer_options":
        for optimizer in OPTIMIZERS.names():
            names.update(OPTIMIZERS.get(optimizer).option_names())
    if key == "optim.schedule_options":
        for schedule in SCHEDULES.names():
            names.update(option_names(SCHEDULES.get(schedule), _SCHEDULE_KEYS))
    return names
