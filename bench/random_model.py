"""A model with random weights made where they stay: nobody needs the 160 GB download to measure."""

from __future__ import annotations

import torch

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.loading import LoadOptions, build_model, kind_dtypes, trunk_dtype
from ..models.hunyuan_image_3.model import HunyuanImage3Model
from ..models.hunyuan_image_3.random_weights import fill_random
from ..models.hunyuan_image_3.sharding import sharding_table
from ..parallel.checkpoint import allocate
from ..parallel.collectives import Communicator
from ..parallel.plan import ParallelPlan


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
