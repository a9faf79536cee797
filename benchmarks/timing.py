"""Time: variants in turn, round by round, so that whatever disturbs the machine disturbs all of
them.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from benchmarks.cases import DTYPES, Pass, Variant


def measure_rounds(
    variants: Sequence[Variant], pass_name: Pass, rounds: int, device: torch.device
) -> Iterator[dict[str, float]]:
    """Yields the milliseconds of every variant, round by round; see `measure_in_turn`."""
    runs = {variant.name: partial(variant.run, pass_name) for variant in variants}
    return measure_in_turn(
        runs, {variant.name: variant.clear for variant in variants}, rounds, device
    )


def measure_in_turn(
    runs: Mapping[str, Callable[[], object]],
    clears: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
) -> Iterator[dict[str, float]]:
    """Yields the milliseconds of every run, round by round.

    A first round is not counted. The order is drawn anew for every round, since memory that one run
    frees makes the next one faster or slower. What `clears` frees, such as gradients, is freed in
    between.
    """
    order = random.Random(0)
    for index in range(rounds + 1):
        times = {}
        for name in order.sample(list(runs), len(runs)):
            times[name] = measure(runs[name], device)
            clears[name]()
        if index:
            yield times


def measure(run: Callable[[], object], device: torch.device) -> float:
    """Returns the milliseconds of one call; on CUDA those between two events around it."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - begin)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    first.record()
    run()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


def median_ratio(times: Sequence[Mapping[str, float]], name: str, base: str) -> float:
    """Returns the median over rounds of a variant's time over that of `base` in the same round."""
    return statistics.median(round_[name] / round_[base] for round_ in times)


def square_tflops(dtype_name: str, rounds: int, device: torch.device) -> float:
    """Returns the TFLOP/s of one large square matrix product: what the machine gives at most, in
    this very run.
    """
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[dtype_name]) for _ in range(2))
    times = [measure(lambda: a @ b, device) for _ in range(rounds + 1)][1:]
    return 2 * size**3 / statistics.median(times) / 1e9


def capture_cuda_graph(variant: Variant, pass_name: Pass) -> str:
    """Returns `yes` when the pass can be captured into a CUDA graph and replayed, else `no: ` and
    why.
    """
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                variant.run(pass_name)
                variant.clear()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            variant.run(pass_name)
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"no: {(str(error).splitlines() or [''])[0]}"
    finally:
        variant.clear()
    return "yes"
