"""Collectives as values: which rank sends what to whom, timed without any rank.

Read `schedule`, then `rings` and the other builders, then `simulate`, which gives the time of a
schedule on a `topology`. These need no torch. `ranks` runs schedules on tensors, in place of
torch's collectives; `planner` times the collectives of a planned run for `command`.
"""
