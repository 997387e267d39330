"""`phase-parallel demo`: four ranks make pictures together, from requests to rank 0 of a real ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from ..train.mini_folder import SHIPPED
from .demo_mini import mini_demo
from .demo_random import random_demo
from .up import choose_device

DemoCheckpoint = Literal["mini", "random"]
CHECKPOINTS: tuple[DemoCheckpoint, ...] = get_args(DemoCheckpoint)
RANKS = 4


def demo(*, device: str, output: Path, checkpoint: DemoCheckpoint | None = None) -> int:
    """``checkpoint`` None: `mini` where the pack has its checkpoints, else `random`. Returns 0 when everything is saved and all ranks agree on it, and
    raises LaunchError otherwise."""
    device, _ = choose_device(device, RANKS)
    checkpoint = checkpoint or ("mini" if SHIPPED.is_dir() else "random")
    {"mini": mini_demo, "random": random_demo}[checkpoint](device, output, ranks=RANKS)
    print("All ranks agree; no process, port or temporary file is left.")
    return 0
