"""The report on a model and its training."""
