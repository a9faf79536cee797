"""Times: variants in turn, round by round.

A disturbance of the machine affects all of them equally.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.cases import Pass, Variant

WARM_UP_RUNS = 3

Name = TypeVar("Name")


def measure_rounds(
    variants: Sequence[Variant],
    pass_name: Pass,
    rounds: int,
    device: torch.device,
    rulers: Mapping[str, Callable[[], object]],
) -> Iterator[dict[str, float]]:
    """Yields the milliseconds of every variant and ruler, round by round; see `measure_in_turn`.

    Tokens are redrawn for every round, as in training: the experts' loads then change, and
    libraries may have to prepare for new sizes.
    """
    runs = {**{variant.name: partial(variant.run, pass_name) for variant in variants}, **rulers}
    clears = {variant.name: variant.clear for variant in variants}
    return measure_in_turn(runs, clears, rounds, device, prepare=partial(draw_tokens, variants))


@torch.no_grad()
def draw_tokens(variants: Sequence[Variant]) -> None:
    """Fills the inputs of all variants with new tokens, an input that they share once."""
    inputs: dict[int, Tensor] = {}
    for variant in variants:
        inputs[variant.x.data_ptr()] = variant.x
    for x in inputs.values():
        x.normal_()


def measure_in_turn(
    runs: Mapping[str, Callable[[], object]],
    clears: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    prepare: Callable[[], object] | None = None,
) -> Iterator[dict[str, float]]:
    """Yields the milliseconds of every run, round by round.

    A first round is not counted. The order is redrawn for every round, since memory that one run
    frees makes the next one faster or slower.

    Args:
        runs: Measured functions, by name.
        clears: Functions that free the memory of a run, such as gradients; not measured. Runs that
            keep no memory need none.
        rounds: Number of repetitions.
        device: Where it runs.
        clock: See `measure`.
        prepare: Function to call before every round.
    """
    generator = random.Random(0)
    for round_index in range(rounds + 1):
        if prepare is not None:
            prepare()
        times: dict[str, float] = {}
        for name in generator.sample(list(runs), len(runs)):
            times[name] = measure(runs[name], device, clock)
            if name in clears:
                clears[name]()

        is_warm_up = round_index == 0
        if not is_warm_up:
            yield times


def measure(
    run: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the milliseconds of one call; on CUDA those between two events around it.

    Args:
        run: Function to measure.
        device: Where it runs.
        clock: Seconds on a CPU, e.g. `time.process_time` counts the CPU time of all threads of this
            process.
    """
    if device.type != "cuda":
        start = clock()
        run()
        return 1000 * (clock() - start)

    # The host runs ahead of the device: events are timed where the work is done.
    start_event = torch.cuda.Event(enable_timing=True)
    end_event = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start_event.record()
    run()
    end_event.record()
    torch.cuda.synchronize(device)
    return start_event.elapsed_time(end_event)


def median_ratio(times: Sequence[Mapping[Name, float]], name: Name, base: Name) -> float:
    """Returns the median over rounds of a variant's time over that of `base` in the same round."""
    return statistics.median(round_[name] / round_[base] for round_ in times)


def ratio_range(
    times: Sequence[Mapping[Name, float]], name: Name, base: Name
) -> tuple[float, float]:
    """Returns the least and the largest ratio of `median_ratio` in any round."""
    ratios = [round_[name] / round_[base] for round_ in times]
    return min(ratios), max(ratios)


def ratio_text(ratio: float, least_and_largest: tuple[float, float]) -> str:
    """Returns a ratio and its range as text."""
    least, largest = least_and_largest
    return f"{ratio:.2f} ({least:.2f}-{largest:.2f})"


def capture_cuda_graph(variant: Variant, pass_name: Pass) -> str:
    """Returns `yes` when the pass can be captured into a CUDA graph and replayed, else why not.

    Returns:
        `yes`, or `no: ` and the first line of the error.
    """
    try:
        graph = capture_graph(partial(variant.run, pass_name), WARM_UP_RUNS, variant.clear)
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        lines = str(error).splitlines() or [""]
        return f"no: {lines[0]}"
    finally:
        variant.clear()
    return "yes"


def capture_graph(
    run: Callable[[], object], warm_up_runs: int, clear: Callable[[], object] = tuple
) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of one call of `run`, after some on a side stream, as torch requires."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(warm_up_runs):
            run()
            clear()
    torch.cuda.current_stream().wait_stream(side_stream)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
