"""The flow-matching schedule: noise levels, Euler step, embedder inputs. Imports torch only."""

from __future__ import annotations

import torch

TIMESTEP_SCALE = 1000.0


class ScheduleError(ValueError):
    """A sampler setting is outside what the schedule is defined for."""


def flow_sigmas(steps: int, shift: float) -> torch.Tensor:
    """Noise levels from 1 down to 0, fp32 `[steps + 1]` on the CPU; step i goes from entry i to i + 1.

    `shift` above 1 spends more steps at high noise. Raises ScheduleError when steps < 1 or shift is not a
    positive number.
    """
    if steps < 1:
        raise ScheduleError(f"The number of steps is {steps}; it must be at least 1.")
    if not 0 < shift < float("inf"):
        raise ScheduleError(f"flow_shift is {shift}; it must be a number above 0, the releases use 3.")
    sigmas = torch.linspace(1, 0, steps + 1, dtype=torch.float32)
    if shift == 1:
        return sigmas
    return (shift * sigmas) / (1 + (shift - 1) * sigmas)


def flow_timesteps(sigmas: torch.Tensor) -> torch.Tensor:
    """What the timestep embedders are fed: 1000 times the noise level, same shape, fp32.

    Entry i is t of step i; entry i + 1 is its r (the MeanFlow embedder of Distil), 0 at the last step.
    """
    return sigmas.float() * TIMESTEP_SCALE


def guidance_embedding_input(guidance: float) -> float:
    """What Distil's guidance embedder is fed: 1000 times the guidance, rounded to bf16 (2.5 gives 2496)."""
    return float(torch.tensor(TIMESTEP_SCALE * guidance, dtype=torch.bfloat16))


def euler_step(latent: torch.Tensor, velocity: torch.Tensor, sigma: float, sigma_next: float) -> torch.Tensor:
    """Move a latent along a velocity of the same shape from one noise level to the next, in fp32."""
    return latent.float() + (sigma_next - sigma) * velocity.float()
