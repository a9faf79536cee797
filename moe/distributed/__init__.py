"""Meshes, collectives and sharding; nothing here depends on models."""
