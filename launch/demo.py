"""`phase-parallel demo`: four ranks make pictures together, from requests to rank 0 of a real ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..bench.report import require_folder
from .demo_mini import mini_demo
from .demo_random import random_demo
from .up import choose_device

DemoCheckpoint = Literal["mini", "random"]
RANKS = 4


def demo(*, device: str, output: Path, checkpoint: DemoCheckpoint = "mini") -> int:
    """Returns 0 when everything is saved and all ranks agree on it, and raises LaunchError otherwise,
    or BenchError for a place that cannot be written."""
    device, _ = choose_device(device, RANKS)
    require_folder(output, option="--output")
    {"mini": mini_demo, "random": random_demo}[checkpoint](device, output, ranks=RANKS)
    print("All ranks agree; no process, port or temporary file is left.")
    return 0
