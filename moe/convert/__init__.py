"""Loads other libraries' checkpoints into our models, and writes them back."""
