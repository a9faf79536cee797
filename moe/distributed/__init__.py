"""What several ranks do together: tensors and ranks, never a model."""
