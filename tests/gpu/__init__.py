"""Tests of a GPU against the CPU; without a GPU they run on the CPU twice."""
