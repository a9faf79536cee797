"""Collectives as values: which rank sends what to whom, checked exactly and timed without a rank.

Read `schedule`, then `rings` and the other builders, then the two readers that need no network:
`verify` for exactness and `simulate` for time on a `topology`. Needs numpy only; the third reader,
which sends tensors, is `moe.distributed.scheduled`.
"""
