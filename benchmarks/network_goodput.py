"""Cost of failures at scale: mean times between them, and the share of time that is left."""

from benchmarks.network_rows import REPORTS, THIRD_PARTY, VENDOR, Claim, Row, published
from moe.planning.goodput import effective_time

_MINUTES = 60


@REPORTS.register("goodput")
def goodput_rows() -> list[Row]:
    """Returns G1 and G2: the share of time without stalls, and failures of a published run."""
    return [*_stalls(), *_published_run()]


def _stalls() -> list[Row]:
    paper = published("goodput")
    mtbf = paper["mtbf_minutes"]

    # 44 % is rounded; 80 % includes other losses.
    tolerances = (0.011, 0.0625)
    rows = []
    for stall, theirs, relative in zip(
        paper["stall_minutes"], paper["effective_time"], tolerances, strict=True
    ):
        claim = Claim("G1", f"effective time, stalls of {stall} min every {mtbf}", "", VENDOR)
        rows.append(claim.close(effective_time(stall, mtbf), theirs, relative))
    return rows


def _published_run() -> list[Row]:
    run = published("llama_3")

    # Per job, per GPU, and the cost of a failure.
    mtbf_hours = run["days"] * 24 / run["failures"]
    gpu_kilohours = mtbf_hours * run["gpus"] / 1000
    lost_minutes = (1 - run["effective_time"]) * mtbf_hours * _MINUTES

    mtbf = Claim("G2", "mean time between failures of a run on 16,384 GPUs", "h", THIRD_PARTY)
    per_gpu = Claim("G2", "the same for one GPU", "kh", THIRD_PARTY)
    lost = Claim("G2", "most time lost to a failure at 90 % effective time", "min", THIRD_PARTY)
    return [
        mtbf.close(mtbf_hours, run["mtbf_hours"], 0.02),
        per_gpu.close(gpu_kilohours, run["gpu_kilohours"], 0.01),
        lost.close(lost_minutes, run["lost_minutes"], 0.05),
    ]
