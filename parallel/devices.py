"""The device of this rank."""

from __future__ import annotations

import torch

from .environment import LaunchEnvironment


def own_device(environment: LaunchEnvironment) -> torch.device:
    """Where our launcher started this process: the one GPU that it made visible, or this rank's of all of them."""
    if environment.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", environment.local_rank if torch.cuda.device_count() > environment.local_rank else 0)
