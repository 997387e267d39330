"""Distils the trained model into one that needs 8 steps and no second branch: a step's whole way becomes one velocity (MeanFlow), guidance an input.

The teacher walks from one noise level of a short schedule to the next in a few guided steps; the student learns the straight way. Imports torch and its
neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.schedule import TIMESTEP_SCALE, flow_sigmas
from ..models.hunyuan_image_3.tokenizer import HunyuanTokenizer
from .batches import Batches, Shares
from .loop import LossLog
from .objective import NOISE_SHIFT, TEXT_WEIGHT, text_loss, text_targets
from .packing import LENGTH_STEP, PAD, Bucket
from .training_run import NOT_KEPT, Keeping, Pace, Tensors, train_network
from .trunk import StepTimes, TrainingTrunk
from .trunk_training import SHARES

SCHEDULES = (8, 8, 8, 6, 12)
"""Lengths of the schedules whose steps are learned, every step with the same chance."""
STEPS = {length: torch.stack([(grid := flow_sigmas(length, NOISE_SHIFT))[:-1], grid[1:]], dim=1) for length in set(SCHEDULES)}
"""Noise level before and after each step of a schedule, ``[length, 2]``."""
SUBSTEPS = 3
GUIDANCE = (1.5, 4.0)


def train_distil(
    config: HunyuanImage3Config,
    tokenizer: HunyuanTokenizer,
    teacher_config: HunyuanImage3Config,
    teacher_weights: Mapping[str, Tensor],
    buckets: Sequence[Bucket],
    pace: Pace,
    *,
    seed: int,
    log: LossLog,
    shares: Shares = SHARES,
    keeping: Keeping = NOT_KEPT,
) -> Tensors:
    """As ``train_trunk``, for the Distil variant. ``buckets`` are the teacher's; the student's rows have two more tokens."""
    device = buckets[0].tokens.device
    teacher = TrainingTrunk(teacher_config)
    teacher.load_state_dict(dict(teacher_weights))
    teacher.placed(device).requires_grad_(False)
    student = TrainingTrunk(config)
    student.initialize(seed)
    missing = student.load_state_dict(dict(teacher_weights), strict=False)
    assert all(key.startswith(("guidance_emb.", "timestep_r_emb.")) for key in missing.missing_keys) and not missing.unexpected_keys
    student.placed(device)
    steps = torch.cat([STEPS[length] for length in SCHEDULES]).to(device)

    def loss_of(batch: Bucket, generator: torch.Generator) -> tuple[Tensor, Mapping[str, Tensor]]:
        velocity, text = distil_losses(student, teacher, batch, distil_bucket(batch, tokenizer), steps, generator)
        return velocity + TEXT_WEIGHT * text, {"velocity": velocity, "text": text}

    batches = Batches(buckets, shares, tokens=pace.tokens, seed=seed)
    return train_network("distil", student, batches, pace, loss_of, seed=seed, log=log, keeping=keeping)


def distil_losses(
    student: TrainingTrunk, teacher: TrainingTrunk, batch: Bucket, distil_batch: Bucket, steps: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mean square of what the student's step misses the teacher's by, and nats per token. One of the ``steps [n, 2]`` and one guidance for each row."""
    device, count = batch.tokens.device, len(batch)

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    sigma, after = steps[(uniform() * len(steps)).long()].unbind(1)
    guidance = GUIDANCE[0] + (GUIDANCE[1] - GUIDANCE[0]) * uniform()
    clean = batch.latents.float()
    noise = torch.randn(clean.shape, generator=generator, device=device)
    start = torch.lerp(clean, noise, sigma[:, None, None, None])
    with torch.no_grad():
        end = walk(teacher, batch, start, sigma, after, guidance)
        wanted = (end - start) / (after - sigma)[:, None, None, None]
    conditional = torch.zeros(count, dtype=torch.bool, device=device)
    embedded = (TIMESTEP_SCALE * guidance).bfloat16().float()
    times = StepTimes(TIMESTEP_SCALE * sigma, TIMESTEP_SCALE * after, embedded)
    out = student(distil_batch, start, times, conditional)
    return F.mse_loss(out.velocity, wanted), text_loss(out.logits, text_targets(distil_batch, conditional))


def walk(teacher: TrainingTrunk, batch: Bucket, latents: Tensor, sigma: Tensor, after: Tensor, guidance: Tensor) -> Tensor:
    """``latents [B, C, h, w]`` from noise ``sigma [B]`` to ``after [B]`` in SUBSTEPS guided Euler steps."""
    count = len(batch)
    both = batch.chosen(torch.arange(count, device=sigma.device).repeat(2))
    unconditional = torch.arange(2 * count, device=sigma.device) >= count
    for number in range(SUBSTEPS):
        now = torch.lerp(sigma, after, number / SUBSTEPS)
        velocity = teacher(both, latents.repeat(2, 1, 1, 1), StepTimes((TIMESTEP_SCALE * now).repeat(2)), unconditional, text=False).velocity
        cond, uncond = velocity.chunk(2)
        guided = uncond + guidance[:, None, None, None] * (cond - uncond)
        latents = latents + ((after - sigma) / SUBSTEPS)[:, None, None, None] * guided
    return latents


def distil_bucket(bucket: Bucket, tokenizer: HunyuanTokenizer) -> Bucket:
    """The same examples with `<guidance>` and `<timestep_r>` behind their `<timestep>`."""
    guidance = tokenizer.require(tokenizer.special.guidance, "<guidance>", "the distilled row")
    timestep_r = tokenizer.require(tokenizer.special.timestep_r, "<timestep_r>", "the distilled row")
    count, length = bucket.tokens.shape
    longest = -(-(length + 2) // LENGTH_STEP) * LENGTH_STEP
    rows = torch.arange(count, device=bucket.tokens.device)

    def longer(tensor: Tensor, fill: int) -> Tensor:
        return torch.cat([tensor, tensor.new_full((count, longest - length, *tensor.shape[2:]), fill)], dim=1)

    tokens, positions = longer(bucket.tokens, PAD), longer(bucket.positions, 0)
    for extra, token in enumerate((guidance, timestep_r)):
        at = bucket.lengths + extra
        tokens.scatter_(1, at[:, None], token)
        positions[rows, at] = at[:, None].to(positions.dtype)
    return replace(
        bucket,
        tokens=tokens,
        blanked=tokens,
        positions=positions,
        groups=longer(bucket.groups, 0),
        lengths=bucket.lengths + 2,
        image_corner=bucket.image_corner + 2,
    )
