"""Trains the trunk and what lies around it on both objectives at once. Imports torch and its neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from .batches import Batches, Shares
from .loop import LossLog
from .objective import losses
from .packing import Bucket
from .training_run import NOT_KEPT, Keeping, Pace, Tensors, train_network
from .trunk import TrainingTrunk

SHARES: Shares = {
    (0, "nothing"): 0.24,
    (0, "recaption"): 0.07,
    (0, "think_recaption"): 0.25,
    (1, "nothing"): 0.05,
    (1, "recaption"): 0.05,
    (1, "think_recaption"): 0.16,
    (2, "nothing"): 0.03,
    (2, "recaption"): 0.03,
    (2, "think_recaption"): 0.12,
}
"""Of the rows that are learned from. A row with source pictures is long, so these get three fifths of the steps."""
WEIGHT_DECAY = 0.01


def train_trunk(
    config: HunyuanImage3Config,
    buckets: Sequence[Bucket],
    pace: Pace,
    *,
    seed: int,
    log: LossLog,
    shares: Shares = SHARES,
    keeping: Keeping = NOT_KEPT,
) -> Tensors:
    """Running mean of all weights by checkpoint key, fp32, on the buckets' device."""
    network = TrainingTrunk(config)
    network.initialize(seed)
    network.placed(buckets[0].tokens.device)

    def loss_of(batch: Bucket, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        result = losses(network, batch, generator)
        return result.total, {"velocity": result.velocity, "text": result.text, "balance": result.balance}

    batches = Batches(buckets, shares, tokens=pace.tokens, seed=seed)
    return train_network("trunk", network, batches, pace, loss_of, seed=seed, log=log, keeping=keeping, decay=WEIGHT_DECAY)
