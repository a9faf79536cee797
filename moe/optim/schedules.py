"""Learning rates as pure functions of the step."""

import math
from collections.abc import Callable
from typing import Literal

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

Warmup = Literal["constant", "linear"]
DecayStart = Literal["warmup_end", "first_step"]


@SCHEDULES.register("rsqrt")
def rsqrt(
    *,
    lr: float,
    warmup_steps: float,
    warmup: Warmup = "constant",
    warmup_start: int = -1,
    first_step: int = 0,
) -> Schedule:
    """Returns lr / sqrt(max(step, warmup_steps)): constant at first, then falling.

    Args:
        lr: Numerator. The highest rate is lr / sqrt(warmup_steps): 0.01 for 1.0 and 10,000 steps.
        warmup_steps: Steps at the highest rate; 0 is read as 1.
        warmup: `linear` rises to the highest rate over these steps instead of starting with it.
        warmup_start: Step at which a linear warm-up has the rate 0; see `polynomial`.
        first_step: Steps of the run that made the model, from which the rate continues without a
            jump, as sparse upcycling does (arXiv:2212.05055).

    Source:
        ST-MoE (arXiv:2202.08906) §6.2; `truncated_rsqrt` of Mesh-TensorFlow, T5X pretrain.gin.
        Differs: no. With `linear`: `linear_warmup * rsqrt_decay` of flax's examples.
    """
    _check_warmup_start(warmup_start)
    check_integer("first_step", first_step, least=0)

    def rate(step: int) -> float:
        step += first_step
        highest = lr / math.sqrt(max(step, warmup_steps, 1))
        if warmup == "constant":
            return highest
        return highest * _warmed_up(step, warmup_steps, warmup_start)

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


@SCHEDULES.register("polynomial")
def polynomial(
    *,
    lr: float,
    warmup_steps: float,
    total_steps: int,
    power: float = 2.0,
    end_lr: float = 0.0,
    decay_steps: float | None = None,
    decay_start: DecayStart = "warmup_end",
    warmup_start: int = -1,
) -> Schedule:
    """Returns end_lr + (lr - end_lr) (1 - t / decay_steps)^power after a linear warm-up.

    Args:
        lr: The rate at which the warm-up ends.
        warmup_steps: Steps over which the rate rises; 0 for no warm-up.
        total_steps: Steps of the run.
        power: 1 decays linearly; larger values decay faster at first.
        end_lr: The rate after `decay_steps`, and from then on.
        decay_steps: Duration of the decay in steps; None for the rest of the run.
        decay_start: Where t is 0. From the `first_step`, the end of the warm-up jumps to a rate
            that has been falling since then (BERT).
        warmup_start: Step at which the warm-up has the rate 0. -1 gives the first update a positive
            rate, 0 a rate of zero; lower numbers start with a higher rate.

    Raises:
        ConfigError: When an option is out of range.

    Source:
        MLPerf-0.6 on TPU-v3 pods (arXiv:1909.09756) and multipod (arXiv:2011.03641), as in
        mlcommons/training_results_v0.7: resnet lars_util.py and train.py, bert optimization.py.
        Differs: the first update has a rate above 0, unless `warmup_start` is 0.
    """
    check_number("power", power, above=0)
    check_number("end_lr", end_lr, least=0, most=lr, reason="it is the end of a fall from lr")
    _check_warmup_start(warmup_start)

    # Start and duration of the decay.
    start = 0.0
    if warmup_steps and decay_start == "warmup_end":
        start = warmup_start + warmup_steps
    if decay_steps is None:
        decay_steps = max(1.0, total_steps - start)
    check_number("decay_steps", decay_steps, least=1)
    length = decay_steps

    def rate(step: int) -> float:
        if step - warmup_start < warmup_steps:
            return lr * _warmed_up(step, warmup_steps, warmup_start)
        fallen = min(1.0, max(0.0, (step - start) / length))
        return end_lr + (lr - end_lr) * (1.0 - fallen) ** power

    return rate


@SCHEDULES.register("linear")
def linear(
    *,
    lr: float,
    warmup_steps: float,
    total_steps: int,
    end_lr: float = 0.0,
    decay_steps: float | None = None,
    decay_start: DecayStart = "warmup_end",
    warmup_start: int = -1,
) -> Schedule:
    """Returns a rate that rises and falls linearly: `polynomial` with the power 1."""
    return polynomial(
        lr=lr,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        power=1.0,
        end_lr=end_lr,
        decay_steps=decay_steps,
        decay_start=decay_start,
        warmup_start=warmup_start,
    )


def _warmed_up(step: int, warmup_steps: float, warmup_start: int) -> float:
    return min(1.0, (step - warmup_start) / warmup_steps) if warmup_steps else 1.0


def _check_warmup_start(warmup_start: int) -> None:
    reason = "the first update is step 0"
    check_integer("warmup_start", warmup_start, most=0, reason=reason)


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
