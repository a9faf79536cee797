"""Runs many requests through an encoder-decoder: continuous batching."""
