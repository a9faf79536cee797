"""Collectives as values: which rank sends what to whom, timed without any rank.

Read `schedule`, then `rings` and the other builders, then `simulate`, which gives the time of a
schedule on a `topology`. Needs no torch; `moe.distributed.scheduled` runs schedules on tensors.
"""
