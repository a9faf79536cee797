"""Configurations and encoder-decoder models built around the sparse layer."""
