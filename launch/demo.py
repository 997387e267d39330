"""`phase-parallel demo`: four ranks make pictures together, from requests to rank 0 of a real ComfyUI."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

from .demo_mini import mini_demo
from .demo_random import random_demo
from .errors import LaunchError
from .up import choose_device

DemoCheckpoint = Literal["mini", "random"]
RANKS = 4


def demo(*, device: str, output: Path, checkpoint: DemoCheckpoint = "mini") -> int:
    """Returns 0 when everything is saved and all ranks agree on it, and raises LaunchError otherwise."""
    device, _ = choose_device(device, RANKS)
    _require_folder(output)
    {"mini": mini_demo, "random": random_demo}[checkpoint](device, output, ranks=RANKS)
    print("All ranks agree; no process, port or temporary file is left.")
    return 0


def _require_folder(output: Path) -> None:
    """Before any rank starts. Raises LaunchError when no file can be written there."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output, prefix=".phase-parallel-"):
            pass
    except OSError as error:
        raise LaunchError(f"--output {output} is no folder that can be written ({error.strerror}); choose another.") from error
