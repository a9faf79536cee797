"""Metrics, their intervals, and tests between two systems."""
