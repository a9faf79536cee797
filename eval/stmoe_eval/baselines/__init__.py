"""Baselines without a neural network."""
