"""Ablation: the loss without each expert, one at a time."""
