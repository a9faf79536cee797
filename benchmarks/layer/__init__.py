"""Sparse layers beside dense ones and those of other libraries."""
