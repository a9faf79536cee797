"""Evaluation of sequence-to-sequence checkpoints: python -m eval."""
