"""``phase-parallel train``: the mini model from nothing, both variants."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch

from .errors import MiniError
from .loss_plot import require_matplotlib
from .recipe import FULL, train


def main(arguments: list[str], *, require_folder: Callable[[Path], None]) -> int:
    """Raises MiniError for what cannot be done, before any training. ``require_folder`` makes a folder, and raises where nothing can be written into it."""
    options = parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise MiniError("train --device cuda needs a CUDA device and this machine has none; on a CPU add --device cpu --scale 0.0002 to try the program.")
    if not 0 < options.scale <= 1:
        raise MiniError(f"--scale {options.scale} is outside (0, 1]; 1 is the whole recipe.")
    if options.workers < 1:
        raise MiniError(f"--workers {options.workers} is too few; give 1 or more.")
    require_folder(options.out)
    require_matplotlib()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    train(options.out, torch.device(options.device), recipe=FULL.scaled(options.scale), workers=options.workers, tell=lambda line: print(line, flush=True))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="phase-parallel train", description="Train the mini model: VAE, vision tower, trunk, then the distilled variant.")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="for both checkpoints, the losses and their plot; a stopped run goes on there")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: cuda")
    made.add_argument("--scale", type=float, default=1.0, metavar="SHARE", help="share of the recipe's steps and examples; less than 1 only tries the program")
    made.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that draw examples (default: one a CPU core)")
    return made
