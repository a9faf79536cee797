"""The sparse layer; read: config, groups, capacity, router, plan, dispatch, experts, losses, stats,
layer.
"""
