"""How fast batches are made."""
