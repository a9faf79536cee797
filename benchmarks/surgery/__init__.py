"""Experiments on the effects of surgeries: one model before and after."""
