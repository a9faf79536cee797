"""Weak scaling: a whole training step on a mesh.

Every rank has as many rows as one process has alone.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.machine import Columns, report_table
from benchmarks.ranks.processes import Job, measure_together
from benchmarks.timing import median_ratio, ratio_range
from moe.data.pipeline import Batch
from moe.distributed.mesh import Mesh, MeshConfig, build_mesh
from moe.models.configuration import STMoEConfig
from moe.models.modeling import STMoEForConditionalGeneration
from moe.models.parallelize import shard_model
from moe.optim.adafactor import Adafactor
from moe.optim.parameter_groups import parameter_groups
from moe.training.recipe import OptimRecipe, PretrainRecipe, TrainingRecipe
from moe.training.step import train_step

COLUMNS: Columns = (
    ("mesh", "mesh", ""),
    ("ms", "ms", ".0f"),
    ("one / it", "efficiency", ".2f"),
    ("apart / it", "of_apart", ".2f"),
    ("CPU ms", "cpu_ms", ".0f"),
    ("one / it in CPU time", "cpu_efficiency", ".2f"),
    ("range", "range", ""),
)


@dataclass(frozen=True)
class ScalingCase:
    """Sizes of a model and of one rank's part of a batch.

    Attributes:
        rows: Sequences of a rank.
        length: Tokens of an encoder input.
        targets: Tokens of a decoder's targets.
        d_model: D.
        d_ff: F.
        num_layers: Blocks of the encoder, and of the decoder; every second one is sparse.
        num_experts: E.
        vocab_size: V.
        precision: As in a recipe.
    """

    rows: int = 8
    length: int = 512
    targets: int = 128
    d_model: int = 512
    d_ff: int = 1024
    num_layers: int = 4
    num_experts: int = 8
    vocab_size: int = 8192
    precision: Any = "float32"


def scaling_on_ranks(device: torch.device, case: ScalingCase, rounds: int) -> dict[str, Any]:
    """Returns the times of a training step; runs on every rank.

    `one` is the first rank's step while the others wait; `apart` the same step on every rank at
    once, without exchanges: its slowdown is due to the machine, not to us.
    """
    # One process alone, all ranks apart, and every mesh of all ranks.
    num_ranks = dist.get_world_size()
    step_alone = build_step(case, device, None)
    jobs = [Job("one", step_alone if dist.get_rank() == 0 else None), Job("apart", step_alone)]
    for name, config in scaling_meshes(num_ranks).items():
        jobs.append(Job(name, build_step(case, device, build_mesh(config, device.type))))
    times = measure_together(jobs, rounds, device)

    # Perfect scaling is an efficiency of 1: a rank has as many rows as one process has alone.
    rows: list[dict[str, Any]] = []
    for job in jobs:
        rows.append(
            {
                "mesh": job.name,
                "ms": statistics.median(round_[job.name] for round_ in times.wall),
                "efficiency": median_ratio(times.wall, "one", job.name),
                "of_apart": median_ratio(times.wall, "apart", job.name),
                "cpu_ms": statistics.median(round_[job.name] for round_ in times.cpu),
                "cpu_efficiency": median_ratio(times.cpu, "one", job.name),
                "cpu_efficiency_range": ratio_range(times.cpu, "one", job.name),
            }
        )
    return {
        "ranks": num_ranks,
        "precision": case.precision,
        "tokens": case.rows * (case.length + case.targets),
        "rows": rows,
    }


def scaling_meshes(num_ranks: int) -> dict[str, MeshConfig]:
    """Returns the meshes to measure: experts over all ranks, FSDP over all ranks, and both."""
    meshes = {
        f"ep {num_ranks}": MeshConfig(ep=num_ranks),
        f"dp_shard {num_ranks}": MeshConfig(dp_shard=num_ranks),
    }
    if num_ranks % 2 == 0 and num_ranks > 2:
        shards = num_ranks // 2
        meshes[f"dp_shard {shards}, ep 2"] = MeshConfig(dp_shard=shards, ep=2)
    return meshes


def build_step(case: ScalingCase, device: torch.device, mesh: Mesh | None) -> Callable[[], object]:
    """Returns a function that does one training step of its own model."""
    model = build_model(case, device)

    # On a mesh the batch grows with the ranks.
    batch_size = case.rows
    if mesh:
        shard_model(model, mesh, bfloat16=case.precision == "bfloat16")
        batch_size *= mesh.config.num_data_ranks
    recipe = PretrainRecipe(
        optim=OptimRecipe(max_grad_norm=1.0),
        training=TrainingRecipe(batch_size=batch_size, precision=case.precision),
    )

    # Everything that is not timed is built here.
    optimizer = Adafactor(parameter_groups(model))
    batch = build_batch(case, device)
    return partial(train_step, model, optimizer, recipe, batch, 0, mesh)


def build_model(case: ScalingCase, device: torch.device) -> STMoEForConditionalGeneration:
    """Returns the model of a case, with the same weights on every mesh."""
    torch.manual_seed(0)
    config = STMoEConfig(
        vocab_size=case.vocab_size,
        d_model=case.d_model,
        d_ff=case.d_ff,
        num_heads=case.d_model // 64,
        num_layers=case.num_layers,
        num_experts=case.num_experts,
        num_sparse_encoder_layers=case.num_layers // 2,
        num_sparse_decoder_layers=case.num_layers // 2,
        group_size=case.length,
        dropout_rate=0.0,
    )
    with device:
        return STMoEForConditionalGeneration(config).train()


def build_batch(case: ScalingCase, device: torch.device) -> Batch:
    """Returns this rank's rows, all tokens real."""
    # Every rank has its own rows.
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def draw(length: int) -> Tensor:
        shape = (case.rows, length)
        return torch.randint(2, case.vocab_size, shape, generator=generator, device=device)

    input_ids = draw(case.length)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "labels": draw(case.targets),
    }


def format_scaling(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the tables of `scaling_on_ranks` as text."""
    # One table for each dtype.
    tables: list[str] = []
    for result in results:
        rows: list[dict[str, Any]] = []
        for row in result["rows"]:
            least, largest = row["cpu_efficiency_range"]
            rows.append({**row, "range": f"{least:.2f}-{largest:.2f}"})

        title = (
            f"training step, {result['tokens']} tokens a rank, {result['ranks']} ranks, "
            f"{result['precision']}"
        )
        tables.append(f"{title}\n{report_table(COLUMNS, rows)}")
    return "\n\n".join(tables)
