"""The peer of the exchange: transformers' own expert parallelism over the same weights.

Its experts are routed by OLMoE's router.
"""

from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases import Problem, Variant
from benchmarks.layer.peers import UnavailableError, build_olmoe, run_olmoe


def transformers_all_to_all(whole: Problem, rank_problem: Problem) -> Variant:
    """Returns transformers' layer as it is trained on a mesh of fsdp_size = ep_size.

    Every rank has other tokens.

    Args:
        whole: With the weights of all experts, which transformers shards.
        rank_problem: With this rank's tokens.

    Raises:
        UnavailableError: When this version of transformers cannot.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError as error:
        raise UnavailableError(
            f"transformers has no ep_implementation before 5.23: {error}"
        ) from error

    # The mesh that its trainer builds.
    num_ranks = dist.get_world_size()
    device_type = rank_problem.x.device.type
    mesh = init_device_mesh(device_type, (num_ranks, 1), mesh_dim_names=("ep", "tp"))
    config = DistributedConfig(
        fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation="all_to_all"
    )

    # Its plan: which parameters are sharded over experts, and which module exchanges rows.
    first = "gate_up_proj" if rank_problem.case.gated else "up_proj"
    plan = {
        f"experts.{first}": "grouped_gemm",
        "experts.down_proj": "grouped_gemm",
        "experts": "ep_dispatch_experts",
    }
    module = build_olmoe(whole)
    apply_expert_parallelism(module, mesh["ep"], mesh["tp"], plan, config.ep_implementation)
    return Variant(
        name="transformers",
        forward=partial(run_olmoe, module),
        x=rank_problem.x,
        gradient=rank_problem.gradient,
        parameters=list(module.train().parameters()),
        rows=rank_problem.case.rows,
    )
