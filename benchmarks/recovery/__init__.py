"""Runs whose ranks are killed, stopped and slowed down."""
