"""Layers and steps on several ranks."""
