"""Learning rates as pure functions of the step."""

import math
from collections.abc import Callable

from moe.errors import ConfigError
from moe.registry import Registry

Schedule = Callable[[int], float]
"""Maps a step, 0 for the first update, to its learning rate."""

SCHEDULES: Registry[Callable[..., Schedule]] = Registry("schedule")
"""Shapes of the learning rate by name; each maker takes `lr` and `warmup_steps`."""


@SCHEDULES.register("rsqrt")
def rsqrt(*, lr: float, warmup_steps: int) -> Schedule:
    """Returns lr / sqrt(max(step, warmup_steps)): constant at first, then falling.

    Args:
        lr: Numerator. The highest rate is lr / sqrt(warmup_steps): 0.01 for 1.0 and 10,000 steps.
        warmup_steps: Steps at the highest rate; 0 is read as 1.

    Source:
        ST-MoE (arXiv:2202.08906) §6.2; `truncated_rsqrt` of Mesh-TensorFlow, T5X pretrain.gin.
        Differs: no.
    """

    def rate(step: int) -> float:
        return lr / math.sqrt(max(step, warmup_steps, 1))

    return rate


@SCHEDULES.register("constant")
def constant(*, lr: float, warmup_steps: int) -> Schedule:
    """Returns `lr` after a linear warm-up.

    Args:
        lr: The rate from step `warmup_steps` - 1 on.
        warmup_steps: Steps over which the rate rises from lr / warmup_steps; 0 starts at `lr`.

    Source:
        T5X fine-tuning default: 1e-3 after 1,000 warm-up steps. Differs: the first step has a rate
        above 0.
    """

    # Step 0 is the first of the warm-up and learns already.
    def rate(step: int) -> float:
        warmed_up = (step + 1) / max(1, warmup_steps)
        return lr * min(1.0, warmed_up)

    return rate


def with_cooldown(schedule: Schedule, *, total_steps: int, cooldown_steps: int) -> Schedule:
    """Returns `schedule` brought linearly to zero over the last `cooldown_steps` of `total_steps`.

    The first of these steps has the full rate, the last one 1 / cooldown_steps of it; 0 steps
    change nothing.

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
