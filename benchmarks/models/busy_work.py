"""The process that works while others are busy: a small model that trains and decodes on request.

    python -m benchmarks.models.busy_work THREADS '{"vocab_size": 8000, ...}'

It reads one part a line, and answers with the milliseconds that the part took. The benchmark sets
its environment, which threads read only once: see benchmarks/models/busy.py.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.model import ModelCase, build_ours, draw_tokens, switch_config
from benchmarks.timing import measure
from moe.models.modeling import STMoEForConditionalGeneration

NUM_EXPERTS = 8
CPU = torch.device("cpu")


def train(model: STMoEForConditionalGeneration, case: ModelCase) -> None:
    """Runs forward and backward of one batch."""
    inputs = draw_tokens(case, case.batch, case.input_length)
    labels = draw_tokens(case, case.batch, case.target_length)
    output = model.train()(input_ids=inputs, labels=labels)
    output.loss.backward()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def decode(model: STMoEForConditionalGeneration, case: ModelCase) -> Tensor:
    """Returns the greedily decoded tokens, as many as the case requires."""
    inputs = draw_tokens(case, 1, case.input_length)
    length = {"min_new_tokens": case.new_tokens, "max_new_tokens": case.new_tokens}
    return model.eval().generate(inputs, **length)


PARTS: Mapping[str, Callable[[STMoEForConditionalGeneration, ModelCase], Any]] = {
    "training": train,
    "decoding": decode,
}


def main(argv: list[str]) -> None:
    """Works until the input ends."""
    torch.set_num_threads(int(argv[0]))
    case = ModelCase(**json.loads(argv[1]))
    model = build_ours(switch_config(case, NUM_EXPERTS))

    # The first run of a part takes memory, and is not counted.
    for run in PARTS.values():
        run(model, case)
    print("ready", flush=True)

    for line in sys.stdin:
        run = PARTS[line.strip()]
        print(measure(lambda run=run: run(model, case), CPU), flush=True)


def worker_arguments(threads: int, case: ModelCase) -> list[str]:
    """Returns the command line of such a process."""
    sizes = json.dumps(dataclasses.asdict(case))
    return [sys.executable, "-m", "benchmarks.models.busy_work", str(threads), sizes]


if __name__ == "__main__":
    main(sys.argv[1:])
