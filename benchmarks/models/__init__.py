"""Whole models: steps, decoding, evaluation and tracing."""
