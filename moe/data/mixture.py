"""Mixtures of tasks: how often each is drawn."""

from moe.errors import ConfigError


def mixing_rate(
    num_examples: int, *, maximum: int | None = None, temperature: float = 1.0, scale: float = 1.0
) -> float:
    """Returns the rate of a task in a mixture; its share is its rate over the sum of all.

    Args:
        num_examples: Training examples of the task, as it gives them: one of ReCoRD is a query with one answer.
        maximum: Cap of the scaled number, so that large tasks do not drown small ones; None for no cap.
        temperature: The capped number is raised to 1 / temperature: more than 1 evens the tasks out.
        scale: Factor of the number before the cap.

    Raises:
        ConfigError: When a number is out of range.

    Source:
        seqio `mixing_rate_num_examples` at b898b9f: scale, then cap, then power. Differs: no. ST-MoE
        (arXiv:2202.08906) §6.1 caps at 65,536.
    """
    if num_examples < 0:
        raise ConfigError(f"num_examples is {num_examples}; expected 0 or more.")
    check_rates(maximum, temperature)
    if not scale > 0:
        raise ConfigError(f"scale is {scale}; expected above 0.")
    rate = num_examples * scale
    if maximum is not None:
        rate = min(rate, maximum)
    return float(rate) if temperature == 1.0 else rate ** (1.0 / temperature)


def check_rates(maximum: int | None, temperature: float) -> None:
    """Raises a ConfigError when no rates follow from these numbers; see `mixing_rate`."""
    if maximum is not None and maximum < 1:
        raise ConfigError(f"mixture.maximum is {maximum}; expected at least 1 example, or null for no cap.")
    if not temperature > 0:
        raise ConfigError(f"mixture.temperature is {temperature}; expected above 0; 1 leaves the rates alone.")
