"""How often each dataset of a mixture is drawn from."""


def mixing_rate(
    num_examples: float, *, maximum: float | None = None, temperature: float = 1.0, scale: float = 1.0
) -> float:
    """Returns the rate of a dataset: min(num_examples * scale, maximum) ** (1 / temperature).

    Args:
        num_examples: Examples after preprocessing, so that a query with two answers counts twice.
        maximum: Cap after scaling; None for none.
        temperature: 1 keeps proportions; larger makes rates more alike.
        scale: Factor of the size.

    Source:
        seqio `utils.mixing_rate_num_examples` at b898b9f. Differs: no.
    """
    rate = num_examples * scale
    if maximum is not None:
        rate = min(rate, maximum)
    return float(rate ** (1.0 / temperature))
