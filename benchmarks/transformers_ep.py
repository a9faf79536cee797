"""The peer of the exchange: transformers' own expert parallelism under OLMoE's router, over the
same weights.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases import Problem, Variant
from benchmarks.peers import UnavailableError, build_olmoe, run_olmoe


def transformers_all_to_all(whole: Problem, mine: Problem) -> Variant:
    """Returns transformers' layer as it is trained on a mesh of fsdp_size = ep_size: every rank has
    other tokens.

    Args:
        whole: With the weights of all experts, which are cut by transformers.
        mine: With this rank's tokens.

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
    ranks = dist.get_world_size()
    config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
    mesh = init_device_mesh(mine.x.device.type, (ranks, 1), mesh_dim_names=("ep", "tp"))
    first = "gate_up_proj" if mine.case.gated else "up_proj"
    plan = {f"experts.{name}": "grouped_gemm" for name in (first, "down_proj")} | {
        "experts": "ep_dispatch_experts"
    }
    module = build_olmoe(whole)
    apply_expert_parallelism(module, mesh["ep"], mesh["tp"], plan, config.ep_implementation)
    parameters = list(module.train().parameters())
    return Variant(
        "transformers",
        lambda x: run_olmoe(module, x),
        mine.x,
        mine.gradient,
        parameters,
        mine.case.rows,
    )
