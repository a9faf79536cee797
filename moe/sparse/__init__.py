"""The sparse layer: tokens choose experts, and travel to them and back.

Read layer.py for the whole journey, then the files in a token's order: config, groups, router,
routers/token_choice, plan, dispatch (expert_parallel where experts are on other ranks), experts;
then losses and stats, which say what the router did, and integration, which puts the layer into
another Transformer.

Letters: B batch, L length, G groups, S tokens of a group, T = G * S tokens, D d_model, F d_ff,
E experts, K choices of a token, C slots of an expert in a group, N rows.
"""
