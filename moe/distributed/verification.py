"""Checksums of a folder that all ranks see: each rank reads a share of its files, and all learn of
all.
"""

from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from moe.checksums import Damage, find_damage, sha256_of
from moe.distributed.collectives import gather_or_raise


def find_damage_together(folder: Path) -> list[Damage]:
    """Returns on every rank the files of a folder that are not what was written; see `find_damage`.

    Every rank must call it.
    """
    rank, num_ranks = _rank_and_size()
    shares = gather_or_raise(lambda: find_damage(folder, part=rank, num_parts=num_ranks))
    damaged = [damage for share in shares for damage in share]
    return sorted(set(damaged))


def sha256_together(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns on every rank the SHA-256 of files, by name; every rank must call it.

    Args:
        folder: Holds the files.
        names: The same on every rank.
    """
    rank, num_ranks = _rank_and_size()
    every = sorted(names)
    own = every[rank::num_ranks]
    shares = gather_or_raise(lambda: [bytes.fromhex(sha256_of(folder / name)) for name in own])

    digests: dict[str, str] = {}
    for number, share in enumerate(shares):
        for name, digest in zip(every[number::num_ranks], share, strict=True):
            digests[name] = digest.hex()
    return digests


def _rank_and_size() -> tuple[int, int]:
    """Returns this process's rank and how many there are."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()
