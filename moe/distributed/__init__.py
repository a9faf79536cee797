"""Meshes, collectives and sharding; nothing here knows what a model is."""
