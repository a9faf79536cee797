"""The sparse layer: tokens are routed to experts, and the outputs are combined.

Begin with layer.py, which shows all steps on one screen. Then read the files in the order of the
computation:

    config            what can be set
    inputs, groups    what comes in, checked, in groups
    router            scores; routers/token_choice: the rule of ST-MoE (capacity: its slots)
    plan              which token goes where
    dispatch          to the experts here and back; expert_parallel: to those on other ranks
    experts           the feed-forwards; moe/kernels has their products
    losses, stats     what the router did
    integration       the layer in another Transformer

Letters: B batch, L length, G groups, S tokens of a group, T = G * S tokens, D d_model, F d_ff,
E experts, K choices of a token, C slots of an expert in a group, N rows.
"""

from moe.sparse.config import SparseConfig
from moe.sparse.editing import edit_routing
from moe.sparse.edits import DropExperts, RerouteExperts, SwapExperts
from moe.sparse.integration import (
    SparseFeedForwardAdapter,
    collect_routers,
    replace_feed_forward,
    router_loss,
)
from moe.sparse.layer import RouterOutput, SparseFeedForward
from moe.sparse.losses import BalanceTotals, RouterLosses, balance_totals
from moe.sparse.plan import DispatchPlan, RouterScores, assign_slots
from moe.sparse.router import Router, RouterInputs
from moe.sparse.router_options import ROUTERS
from moe.sparse.stats import RouterStats

__all__ = [
    "ROUTERS",
    "BalanceTotals",
    "DispatchPlan",
    "DropExperts",
    "RerouteExperts",
    "Router",
    "RouterInputs",
    "RouterLosses",
    "RouterOutput",
    "RouterScores",
    "RouterStats",
    "SparseConfig",
    "SparseFeedForward",
    "SparseFeedForwardAdapter",
    "SwapExperts",
    "assign_slots",
    "balance_totals",
    "collect_routers",
    "edit_routing",
    "replace_feed_forward",
    "router_loss",
]
