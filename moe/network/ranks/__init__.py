"""Schedules on running ranks: gradient sums and exchanges of rows."""
