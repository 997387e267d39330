"""A model with random weights made where they stay: nobody needs the 160 GB download to measure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.loading import LoadOptions, build_model, kind_dtypes, trunk_dtype
from ..models.hunyuan_image_3.model import HunyuanImage3Model
from ..models.hunyuan_image_3.random_weights import fill_random
from ..models.hunyuan_image_3.sharding import sharding_table
from ..parallel.checkpoint import allocate
from ..parallel.collectives import Communicator
from ..parallel.plan import ParallelPlan
from ..parallel.slicing import ShardingTable
from .errors import BenchError


@dataclass(frozen=True)
class RandomShard:
    """Resident random weights of one rank. Plans that keep the same shard in the same layout can be built over them in turn."""

    table: ShardingTable
    resident: dict[str, torch.Tensor]
    dtype: torch.dtype

    def model(self, config: HunyuanImage3Config, plan: ParallelPlan, comm: Communicator, options: LoadOptions, device: torch.device) -> HunyuanImage3Model:
        return build_model(config, plan, comm, options, self.table, self.resident, device=device, dtype=self.dtype)


def random_shard(
    config: HunyuanImage3Config, plan: ParallelPlan, options: LoadOptions, *, device: torch.device, seed: int = 0, fill: bool = True
) -> RandomShard:
    """Needs the memory of the weights and nothing beside it. Without ``fill`` the values are undefined."""
    dtype = trunk_dtype(config, options.weight_dtype)
    table = sharding_table(config, plan, options.moe_layout)
    resident = allocate(table, kind_dtypes(dtype), device)
    if fill:
        fill_random(resident, table.targets, shard=plan.shard, layers=config.num_hidden_layers, seed=seed)
    return RandomShard(table, resident, dtype)


def random_model(
    config: HunyuanImage3Config, plan: ParallelPlan, comm: Communicator, options: LoadOptions, *, device: torch.device, seed: int = 0, fill: bool = True
) -> HunyuanImage3Model:
    """This rank's model of ``config``, over a shard as :func:`random_shard` makes it."""
    return random_shard(config, plan, options, device=device, seed=seed, fill=fill).model(config, plan, comm, options, device)


def checked_options(options: LoadOptions, device: torch.device) -> LoadOptions:
    """Raises BenchError before memory is spent where the device cannot follow."""
    try:
        options.check_device(device)
    except ValueError as error:
        raise BenchError(f"{error}.") from error
    return options
