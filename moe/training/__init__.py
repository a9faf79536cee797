"""Recipes, the training step and loop, checkpoints and metrics."""
