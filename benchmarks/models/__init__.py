"""Whole models: steps and decoding."""
