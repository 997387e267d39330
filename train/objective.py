"""The two objectives of the trunk: the next token, and the velocity of flow matching with dropped conditions. Imports torch and its neighbours.

Letters: B rows of one bucket, C latent channels, h x w the token grid, P places before the picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models.hunyuan_image_3.schedule import TIMESTEP_SCALE
from .packing import Bucket
from .trunk import StepTimes, TrainingTrunk

DROPPED = 0.1
"""Share of rows that see no wish, so that guidance has an unconditional branch."""
TEXT_WEIGHT = 1.0
"""Towards the end the two losses are of one size, about 0.05. With 0.2 the pictures come first, and after an edit the recaption mixes objects up."""
BALANCE_WEIGHT = 0.01
NO_ANSWER = -100
NOISE_SHIFT = 3.0
"""As the release's schedule: more of the noise levels where the layout is decided."""


@dataclass(frozen=True)
class Losses:
    """``total`` is what to descend; ``velocity`` mean square of all latents, ``text`` nats per token."""

    total: Tensor
    velocity: Tensor
    text: Tensor
    balance: Tensor


def noise_levels(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """sigma ``[count]`` in (0, 1), spread evenly over the count before the shift."""
    even = (torch.arange(count, device=device) + torch.rand(count, generator=generator, device=device)) / count
    return NOISE_SHIFT * even / (1 + (NOISE_SHIFT - 1) * even)


def losses(network: TrainingTrunk, batch: Bucket, generator: torch.Generator) -> Losses:
    """One batch. Noisy latents are ``(1 - sigma) x + sigma noise`` and the velocity is ``noise - x`` (spec 4.6: sampling goes from sigma 1 to 0)."""
    device, count = batch.tokens.device, len(batch)
    clean = batch.latents.float()
    noise = torch.randn(clean.shape, generator=generator, device=device)
    sigma = noise_levels(count, generator, device)
    noisy = torch.lerp(clean, noise, sigma[:, None, None, None])
    unconditional = torch.rand(count, generator=generator, device=device) < DROPPED
    out = network(batch, noisy, StepTimes(TIMESTEP_SCALE * sigma), unconditional)
    velocity = F.mse_loss(out.velocity, noise - clean)
    text = text_loss(out.logits, text_targets(batch, unconditional))
    total = velocity + TEXT_WEIGHT * text + BALANCE_WEIGHT * out.balance
    return Losses(total, velocity, text, out.balance)


def text_loss(logits: Tensor, answers: Tensor) -> Tensor:
    """``logits [B, P, vocab]``, ``answers [B, P]`` -> nats per token; 0 where every row of the batch lost its wish."""
    total = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=NO_ANSWER, reduction="sum")
    return total / (answers != NO_ANSWER).sum().clamp_min(1)


def text_targets(batch: Bucket, unconditional: Tensor) -> Tensor:
    """``[B, P]``: the token behind each place where it is one that the assistant writes, else NO_ANSWER; rows without a wish have none."""
    following = torch.arange(1, batch.tokens.shape[1], device=batch.tokens.device)
    first, last = batch.targets.unbind(1)
    wanted = (following >= first[:, None]) & (following < last[:, None]) & ~unconditional[:, None]
    return F.pad(torch.where(wanted, batch.tokens[:, 1:].long(), NO_ANSWER), (0, 1), value=NO_ANSWER)
