"""The optimizer and learning rate of a recipe; a section of the recipes in recipe.py."""

from dataclasses import dataclass, field
from typing import Any

from moe.checks import check, check_integer, check_number
from moe.errors import ConfigError
from moe.optim.optimizers import OPTIMIZERS, check_optimizer
from moe.optim.options import check_options, option_names
from moe.optim.schedules import SCHEDULES, Schedule, with_cooldown

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
            or `linear`.
        schedule_options: Settings of that schedule only, by name; see moe/optim/schedules.py.
        lr: Rate relative to RMS(parameter); for `rsqrt` the numerator, so that the highest rate is
            lr / sqrt(warmup_steps).
        warmup_steps: Steps of constant (`rsqrt`) or linearly rising rate (the others).
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
    warmup_steps: int = 10_000
    cooldown_steps: int = 0
    clipping_threshold: float = 1.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        # An unknown name raises with the closest one.
        OPTIMIZERS.get(self.optimizer)
        SCHEDULES.get(self.schedule)

        check_number("optim.lr", self.lr, above=0)
        for name in ("warmup_steps", "cooldown_steps"):
            check_integer(f"optim.{name}", getattr(self, name), least=0)
        check_number("optim.clipping_threshold", self.clipping_threshold, above=0)
        check_number("optim.weight_decay", self.weight_decay, least=0)
        unclipped = "null to leave gradients as they are"
        check_number("optim.max_grad_norm", self.max_grad_norm, above=0, optional=unclipped)

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

    def schedule_for(self, total_steps: int) -> Schedule:
        """Returns the learning rate as a function of the step.

        Args:
            total_steps: Updates in the run.

        Raises:
            ConfigError: When an option is unknown or out of range.
        """
        make = SCHEDULES.get(self.schedule)
        place = "optim.schedule_options"
        check_options(place, self.schedule, make, self.schedule_options, _SCHEDULE_KEYS)

        # Schedules that need the length of the run have a keyword for it.
        settings: dict[str, Any] = {"lr": self.lr, "warmup_steps": self.warmup_steps}
        settings |= self.schedule_options
        if "total_steps" in option_names(make, ()):
            settings["total_steps"] = total_steps
        try:
            schedule = make(**settings)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
        return with_cooldown(schedule, total_steps=total_steps, cooldown_steps=self.cooldown_steps)


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
