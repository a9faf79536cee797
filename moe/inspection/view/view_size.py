"""How much text a page can show within its size."""

from collections.abc import Callable

import torch

from moe.errors import DataError
from moe.inspection.view.view_trace import Shown
from moe.tracing.trace import STACKS, Trace

_PROBED_EXAMPLES = 16
_MARGIN = 0.99  # of the room, as examples differ in length
_WORTH_GROWING = 1.05
_SHRINKING = 0.9
_FEWEST_TOKENS = 16  # of an example that is cut


def fitting_page(render: Callable[[Shown], str], trace: Trace, most_bytes: int) -> str:
    """Returns the page with as many examples as fit, evenly chosen.

    Args:
        render: Makes the page that shows some examples.
        trace: Their trace.
        most_bytes: Largest size of the page.

    Raises:
        DataError: When not even the start of one example fits.
    """
    num_examples = trace.facts.num_examples
    bare_size = _size(render(Shown([], None)))
    room = most_bytes - bare_size
    if room <= 0:
        raise DataError(
            f"The page may have {most_bytes:,} bytes, and its tables alone have {bare_size:,}. Give a larger "
            "most_bytes, or fewer classes, steps or bars."
        )

    # The size of one choice says how many examples there is room for.
    best = None
    most_fitting = 0
    too_many = num_examples + 1
    number = min(_PROBED_EXAMPLES, num_examples)
    while number > most_fitting:
        page = render(_evenly(number, num_examples))
        size = _size(page)
        estimate = int(_MARGIN * room * number / (size - bare_size))
        if size <= most_bytes:
            best = page
            most_fitting = number
            is_close = estimate < _WORTH_GROWING * number
            number = 0 if is_close else min(estimate, num_examples, too_many - 1)
        else:
            too_many = number
            number = min(estimate, int(_SHRINKING * number))

    return best or _cut_page(render, trace, most_bytes)


def _cut_page(render: Callable[[Shown], str], trace: Trace, most_bytes: int) -> str:
    """Returns the page with the start of the first example."""
    longest = max(int(trace.stack(stack).starts[1]) for stack in STACKS)
    most_tokens = longest
    while most_tokens >= _FEWEST_TOKENS:
        page = render(Shown([0], most_tokens))
        if _size(page) <= most_bytes:
            return page
        most_tokens //= 2

    raise DataError(
        f"The page may have {most_bytes:,} bytes, in which not even {_FEWEST_TOKENS} tokens of an example fit. "
        "Give a larger most_bytes."
    )


def _evenly(number: int, num_examples: int) -> Shown:
    """Returns examples at even distances, the first among them."""
    examples = torch.arange(number) * num_examples // max(1, number)
    return Shown(examples.tolist(), None)


def _size(page: str) -> int:
    return len(page.encode())
