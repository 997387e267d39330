"""Random weights made where they stay, for measuring a model whose files nobody has downloaded.

A folder that holds :data:`FILE_NAME` has no shards; each rank draws its own part. That happens only in a process whose launcher allowed it, so that no
user gets noise for a model by accident. Values depend on the resident tensor's name and on the shard: replicas of a shard are equal, and replicated
tensors are equal on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch

from ...parallel.checkpoint import INDEX_NAME, CheckpointError
from ...parallel.environment import RANDOM_WEIGHTS
from ...parallel.slicing import ShardingTable, Target

FILE_NAME = "random_weights.json"
NOTE = "random weights, for measuring only: texts and pictures are noise"
NORM_SPREAD = 0.1


def declared(folder: str | Path) -> bool:
    return (Path(folder) / FILE_NAME).is_file()


def declare(folder: Path, *, seed: int = 0) -> None:
    """Beside the settings of a checkpoint: no weights, only the wish for random ones. The empty index lets the loader's list show the folder."""
    (folder / FILE_NAME).write_text(json.dumps({"note": NOTE, "seed": seed}) + "\n", encoding="utf-8")
    (folder / INDEX_NAME).write_text('{"weight_map": {}}\n', encoding="utf-8")


class RandomWeights:
    """In the place of :class:`~...parallel.checkpoint.Checkpoint` for a declared folder.

    Raises:
        CheckpointError: this process may not draw weights, or the declaration is damaged.
    """

    def __init__(self, folder: str | Path, *, shard: int, layers: int):
        if os.environ.get(RANDOM_WEIGHTS) != "allowed":
            raise CheckpointError(f"{folder} holds no weights, only the sizes for a benchmark; choose a downloaded checkpoint")
        try:
            self._seed = int(json.loads((Path(folder) / FILE_NAME).read_text(encoding="utf-8"))["seed"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{FILE_NAME} in {folder} has no seed; write the folder again") from error
        self._shard, self._layers = shard, layers

    def check(self, table: ShardingTable) -> None:
        """Nothing can be missing."""

    def load(self, table: ShardingTable, resident: Mapping[str, torch.Tensor], *, progress: Callable[[int, int], None]) -> None:
        fill_random(resident, table.targets, shard=self._shard, layers=self._layers, seed=self._seed, progress=progress)


def fill_random(
    resident: Mapping[str, torch.Tensor],
    targets: Mapping[str, Target],
    *,
    shard: int,
    layers: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Normal values whose products keep the scale of their input; what is added to the residual stream is made smaller by the depth."""
    done, total = 0, sum(tensor.nbytes for tensor in resident.values())
    for name, tensor in resident.items():
        place = f"{seed}:{name}" if targets[name].role == "replicated" else f"{seed}:{name}:{shard}"
        generator = torch.Generator(tensor.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big"))
        tensor.normal_(generator=generator)
        if name.endswith("bias"):
            tensor.mul_(0.02)
        elif tensor.ndim == 1:
            tensor.mul_(NORM_SPREAD).add_(1)
        elif name != "wte":
            into_residual = name.startswith("layers.") and name.endswith(("o_proj", "shared_down", "experts_w2"))
            tensor.mul_(_fan_in(name, tensor) ** -0.5 * (0.5 * layers**-0.5 if into_residual else 1.0))
        done += tensor.nbytes
        progress(done, total)


def _fan_in(name: str, tensor: torch.Tensor) -> int:
    """Values that one output sums over: the last dim of a matrix, also of stacked experts, and the whole kernel of a convolution."""
    return tensor.shape[-1] if ".experts_" in name else prod(tensor.shape[1:])
