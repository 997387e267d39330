"""Which GPU each rank of this machine gets: one of its own, or one that it shares where that was allowed."""

from __future__ import annotations

import os

from ..parallel.environment import SHARE_GPU
from .errors import LaunchError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_for(ranks: int) -> int:
    """GPUs that so many ranks can be given, 0 without any; ``ranks`` where they may share one. Takes seconds: it imports torch."""
    import torch

    found = torch.cuda.device_count()
    return max(found, ranks) if found and _shared() else found


def gpu_of(local_rank: int) -> str:
    """What the rank shall find in ``CUDA_VISIBLE_DEVICES``: entry ``local_rank`` of what the user made visible. Raises LaunchError."""
    visible = [word for word in os.environ.get(_VISIBLE, "").split(",") if word]
    if _shared():
        import torch

        visible = visible or [str(number) for number in range(torch.cuda.device_count())]
        return visible[local_rank % len(visible)]
    if visible and local_rank >= len(visible):
        raise LaunchError(f"Rank {local_rank} has no GPU: {_VISIBLE} names {len(visible)}; start fewer ranks.")
    return visible[local_rank] if visible else str(local_rank)


def see_one_gpu(local_rank: int) -> None:
    """Hide the other GPUs; must come before this process first asks for a device."""
    os.environ[_VISIBLE] = gpu_of(local_rank)


def _shared() -> bool:
    return os.environ.get(SHARE_GPU) == "allowed"
