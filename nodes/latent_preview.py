"""Live pictures from latents: a linear map from latent channels to colours, fitted once to the loaded VAE.

No published factors exist for this latent space and small test checkpoints have other channel counts, so the
map is computed: one picture of known colours is encoded, and the colours are regressed on the latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image

CHART_SIDE = 256
PATCH_SIDE = 32
"""Larger than one latent pixel, so that most latent pixels of the chart see a single colour."""

RIDGE = 1e-3


@dataclass(frozen=True)
class PreviewFactors:
    """`factors`: one (R, G, B) row per latent channel, `bias`: (R, G, B); for latents as the sampler has
    them, colours in [-1, 1].
    """

    factors: list[list[float]]
    bias: list[float]

    def picture(self, latents: torch.Tensor) -> Image.Image:
        """First picture of scaled latents [n, C, h, w]; one picture pixel per latent pixel."""
        weight = torch.tensor(self.factors, dtype=torch.float32)
        first = latents[0].detach().to("cpu", torch.float32)
        colours = torch.einsum("chw,cr->hwr", first, weight) + torch.tensor(self.bias)
        return Image.fromarray(((colours + 1) * 127.5).clamp(0, 255).to(torch.uint8).numpy())


def colour_chart() -> torch.Tensor:
    """Patches of evenly spread colours, [1, 3, CHART_SIDE, CHART_SIDE] fp32 in [-1, 1]; always the same."""
    generator = torch.Generator("cpu").manual_seed(0)
    cells = CHART_SIDE // PATCH_SIDE
    colours = torch.rand(1, 3, cells, cells, generator=generator) * 2 - 1
    return torch.nn.functional.interpolate(colours, scale_factor=PATCH_SIDE, mode="nearest")


def fit_factors(
    encode: Callable[[torch.Tensor], torch.Tensor], *, scale: float, shift: float
) -> PreviewFactors:
    """Ridge regression of the chart's colours on its latents.

    encode: pixels [1, 3, H, W] in [-1, 1] -> unscaled latents [1, C, h, w]. `scale` and `shift` are the VAE's
    factors.
    """
    pixels = colour_chart()
    latents = (encode(pixels).to("cpu", torch.float64) - shift) * scale
    channels, height, width = latents.shape[1:]
    colours = torch.nn.functional.adaptive_avg_pool2d(pixels, (height, width)).double()
    inputs = torch.cat([latents[0].flatten(1), torch.ones(1, height * width, dtype=torch.float64)])
    gram = inputs @ inputs.T + RIDGE * height * width * torch.eye(channels + 1, dtype=torch.float64)
    solution = torch.linalg.solve(gram, inputs @ colours[0].flatten(1).T)
    return PreviewFactors(factors=solution[:channels].tolist(), bias=solution[channels].tolist())
