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
