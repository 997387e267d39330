"""A model with random weights made where they stay: nobody needs the 160 GB download to measure.

Values depend on the resident tensor's name and on the shard, so replicas of a shard are equal and replicated tensors are equal on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod

import torch

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.loading import LoadOptions, build_model, kind_dtypes, trunk_dtype
from ..models.hunyuan_image_3.model import HunyuanImage3Model
from ..models.hunyuan_image_3.sharding import sharding_table
from ..parallel.checkpoint import allocate
from ..parallel.collectives import Communicator
from ..parallel.plan import ParallelPlan
from ..parallel.slicing import Target

NORM_SPREAD = 0.1


def random_model(
    config: HunyuanImage3Config, plan: ParallelPlan, comm: Communicator, options: LoadOptions, *, device: torch.device, seed: int = 0, fill: bool = True
) -> HunyuanImage3Model:
    """This rank's model of ``config``; needs the memory of its resident weights and nothing beside it. Without ``fill`` the values are undefined."""
    dtype = trunk_dtype(config, options.weight_dtype)
    table = sharding_table(config, plan, options.moe_layout)
    resident = allocate(table, kind_dtypes(dtype), device)
    if fill:
        fill_random(resident, table.targets, shard=plan.shard, layers=config.num_hidden_layers, seed=seed)
    return build_model(config, plan, comm, options, table, resident, device=device, dtype=dtype)


def fill_random(resident: Mapping[str, torch.Tensor], targets: Mapping[str, Target], *, shard: int, layers: int, seed: int) -> None:
    """Normal values whose products keep the scale of their input; what is added to the residual stream is made smaller by the depth."""
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


def _fan_in(name: str, tensor: torch.Tensor) -> int:
    """Values that one output sums over: the last dim of a matrix, also of stacked experts, and the whole kernel of a convolution."""
    return tensor.shape[-1] if ".experts_" in name else prod(tensor.shape[1:])
