"""Trains the trunk and what lies around it on both objectives at once. Imports torch and its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from .batches import Batches, Shares
from .loop import Average, LossLog, Stepper
from .objective import losses
from .packing import Bucket
from .trunk import TrainingTrunk

SHARES: Shares = {
    (0, "nothing"): 0.26,
    (0, "recaption"): 0.08,
    (0, "think_recaption"): 0.26,
    (1, "nothing"): 0.06,
    (1, "recaption"): 0.04,
    (1, "think_recaption"): 0.13,
    (2, "nothing"): 0.04,
    (2, "recaption"): 0.03,
    (2, "think_recaption"): 0.10,
}


@dataclass(frozen=True)
class Pace:
    """``steps`` batches of about ``tokens`` tokens, padding counted; ``rate``: the highest learning rate; ``kept_every``: steps between two copies for
    ``keep``."""

    steps: int
    tokens: int
    rate: float
    kept_every: int = 1000


def train_trunk(
    config: HunyuanImage3Config,
    buckets: Sequence[Bucket],
    pace: Pace,
    *,
    seed: int,
    log: LossLog,
    shares: Shares = SHARES,
    keep: Callable[[int, dict[str, Tensor]], None] = lambda step, weights: None,
) -> dict[str, Tensor]:
    """Running mean of all weights by checkpoint key, fp32, on the buckets' device. ``keep(step, weights)`` gets it now and then."""
    device = buckets[0].tokens.device
    network = TrainingTrunk(config)
    network.initialize(seed)
    network.to(device)
    batches = Batches(buckets, shares, tokens=pace.tokens, seed=seed)
    generator = torch.Generator(device).manual_seed(seed)
    stepper = Stepper(network.parameters(), steps=pace.steps, highest=pace.rate, betas=(0.9, 0.95), decay=0.01)
    average = Average(network, decay=decay_for(pace.steps))
    for step in range(1, pace.steps + 1):
        with autocast(device):
            result = losses(network, batches.next(), generator)
        norm = stepper.descend(result.total)
        average.update(network)
        values = {name: float(getattr(result, name).detach()) for name in ("velocity", "text", "balance")}
        log.add("trunk", step, **values, gradient=norm)
        if step % pace.kept_every == 0:
            keep(step, average.weights())
    return average.weights()


def decay_for(steps: int) -> float:
    """The mean reaches back over about a thirtieth of the run."""
    return max(0.9, 1 - 30 / steps)


def autocast(device: torch.device) -> torch.autocast:
    """bf16 products on a GPU; a CPU computes in fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def frozen(network: nn.Module) -> nn.Module:
    """For use as a teacher."""
    return network.eval().requires_grad_(False)
