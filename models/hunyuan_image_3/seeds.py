"""From a user's seed to a random generator. Imports torch only."""

from __future__ import annotations

import hashlib

import torch

_GENERATOR_SEEDS = 1 << 32


def seeded_generator(seed: int) -> torch.Generator:
    """A CPU generator for a seed of 64 bits.

    torch's CPU generator looks at the low 32 bits only, so 0 and 2**40 would draw the same numbers. Larger seeds are hashed; smaller
    ones stay what they are, since they must draw what the official program draws.
    """
    if seed >= _GENERATOR_SEEDS:
        seed = int.from_bytes(hashlib.sha256(seed.to_bytes(8, "little")).digest()[:4], "little")
    return torch.Generator().manual_seed(seed)
