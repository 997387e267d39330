"""The mini model with random weights: all of its sizes, and pictures that show nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from phase_parallel.models.hunyuan_image_3.keys import checkpoint_shapes
from phase_parallel.train.mini import Kind, mini_config, write_mini

SCALING = 0.5


def write_random_mini(folder: Path, kind: Kind) -> Path:
    """The same weights each time; what both kinds have alike is the same in both."""
    config, _ = mini_config(kind, SCALING)
    weights = {}
    for name, shape in checkpoint_shapes(config).items():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        spread = 0.05 * torch.randn(shape, generator=generator)
        weights[name] = 1 + spread if "norm" in name and name.endswith("weight") else spread
    write_mini(folder, kind, weights, SCALING)
    return folder
