"""Learning rates as pure functions of the step."""

import math
from collections.abc import Callable

from moe.checks import check_integer, check_number
from moe.errors import ConfigError
from moe.registry import Registry

Schedule = Callable[[int], float]
"""Maps a step, 0 for the first update, to its learning rate."""

SCHEDULES: Registry[Callable[..., Schedule]] = Registry("schedule")
"""Shapes of the learning rate by name.

Each maker takes `lr` and `warmup_steps`, and `total_steps` when it has such a keyword. Its other
keywords are options of a recipe.
"""


@SCHEDULES.register("rsqrt")
def rsqrt(*, lr: float, warmup_steps: float, first_step: int = 0) -> Schedule:
    """Returns lr / sqrt(max(step, warmup_steps)): constant at first, then falling.

    Args:
        lr: Numerator. The highest rate is lr / sqrt(warmup_steps): 0.01 for 1.0 and 10,000 steps.
        warmup_steps: Steps at the highest rate; 0 is read as 1.
        first_step: Steps of the run that made the model, from which the rate continues without a
            jump, as sparse upcycling does (arXiv:2212.05055).

    Source:
        ST-MoE (arXiv:2202.08906) §6.2; `truncated_rsqrt` of Mesh-TensorFlow, T5X pretrain.gin.
    """
    check_integer("first_step", first_step, least=0)

    def rate(step: int) -> float:
        return lr / math.sqrt(max(step + first_step, warmup_steps, 1))

    return rate


@SCHEDULES.register("constant")
def constant(*, lr: float, warmup_steps: float) -> Schedule:
    """Returns `lr` after a linear warm-up.

    Args:
        lr: The rate from step `warmup_steps` - 1 on.
        warmup_steps: Steps over which the rate rises from lr / warmup_steps; 0 starts at `lr`.

    Source:
        T5X fine-tuning default: 1e-3 after 1,000 warm-up steps. Differs: the first step has a rate
        above 0.
    """

    # Step 0 is the first of the warm-up and already updates the weights.
    def rate(step: int) -> float:
        warmed_up = (step + 1) / max(1, warmup_steps)
        return lr * min(1.0, warmed_up)

    return rate


@SCHEDULES.register("linear")
def linear(
    *, lr: float, warmup_steps: float, total_steps: int, decay_steps: float | None = None
) -> Schedule:
    """Returns a rate that rises linearly to `lr` and then falls linearly to 0.

    Args:
        lr: The rate at which the warm-up ends.
        warmup_steps: Steps over which the rate rises from lr / warmup_steps; 0 starts at `lr`.
        total_steps: Steps of the run.
        decay_steps: Duration of the fall in steps; None for the rest of the run.

    Raises:
        ConfigError: When `decay_steps` is below 1.
    """
    # The last step of the warm-up has the rate lr.
    start = max(0.0, warmup_steps - 1)
    if decay_steps is None:
        decay_steps = max(1.0, total_steps - start)
    check_number("decay_steps", decay_steps, least=1)
    length = decay_steps

    def rate(step: int) -> float:
        if step + 1 < warmup_steps:
            return lr * ((step + 1) / warmup_steps)
        fallen = min(1.0, max(0.0, (step - start) / length))
        return lr * (1.0 - fallen)

    return rate


def with_cooldown(schedule: Schedule, *, total_steps: int, cooldown_steps: int) -> Schedule:
    """Returns `schedule` brought linearly to zero over the last `cooldown_steps` of `total_steps`.

    The first of these steps has the full rate, the last one 1 / cooldown_steps of it; 0 steps have
    no effect.

    Raises:
        ConfigError: When there are more cooldown steps than steps.
    """
    if not 0 <= cooldown_steps <= total_steps:
        raise ConfigError(
            f"cooldown_steps is {cooldown_steps}; expected 0 to the {total_steps} steps of the run."
        )
    if cooldown_steps == 0:
        return schedule

    # The last step, total_steps - 1, still has one share of the rate.
    def rate(step: int) -> float:
        remaining = (total_steps - step) / cooldown_steps
        return schedule(step) * min(1.0, max(0.0, remaining))

    return rate
