"""Sizes of a model that a benchmark measures in a test; rows of 16 bytes, as a GPU's grouped products need."""

from benchmarks.models.model import ModelCase

TINY = ModelCase(
    vocab_size=131,
    d_model=32,
    d_ff=48,
    num_heads=2,
    num_layers=2,
    sparse_layers=1,
    batch=2,
    input_length=13,
    target_length=11,
)
