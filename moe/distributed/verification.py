"""Verifies checksums of a shared folder: each rank reads a part, and all get the result."""

from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from moe.checksums import Damage, find_damage, sha256_of
from moe.distributed.collectives import gather_or_raise, has_ranks


def gather_damage(folder: Path) -> list[Damage]:
    """Returns on every rank the damaged files of a folder; see `find_damage`.

    Every rank must call it.
    """
    rank, num_ranks = _rank_and_size()

    def find_share() -> list[Damage]:
        return find_damage(folder, part=rank, num_parts=num_ranks)

    damage_by_rank = gather_or_raise(find_share)

    # Every rank finds a damaged file of checksums.
    damaged: set[Damage] = set()
    for damage in damage_by_rank:
        damaged.update(damage)
    return sorted(damaged)


def gather_sha256(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns on every rank the SHA-256 of files, by name; every rank must call it.

    Args:
        folder: Holds the files.
        names: The same on every rank.
    """
    rank, num_ranks = _rank_and_size()
    all_names = sorted(names)
    names_here = all_names[rank::num_ranks]

    def read_digests() -> list[bytes]:
        return [bytes.fromhex(sha256_of(folder / name)) for name in names_here]

    digests_by_rank = gather_or_raise(read_digests)

    # Files were assigned in turn.
    digests: dict[str, str] = {}
    for other_rank, rank_digests in enumerate(digests_by_rank):
        rank_names = all_names[other_rank::num_ranks]
        for name, digest in zip(rank_names, rank_digests, strict=True):
            digests[name] = digest.hex()
    return digests


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if has_ranks() else (0, 1)
