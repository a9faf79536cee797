"""Checkpoints of other libraries as ours, and back."""
