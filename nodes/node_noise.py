"""Reference Noise: the initial noise of the official program, for comparing pictures with it."""

from __future__ import annotations

from typing import Any

import torch

from ..models.hunyuan_image_3.references import draw_noise
from . import inputs

REFERENCE_SHAPES = "phase_parallel_reference_shapes"
"""Entry of a LATENT from Encode: the latent shapes of the reference pictures, whose noise comes first."""


class ReferenceNoise:
    """A NOISE object: one CPU generator per picture, numbers drawn in bfloat16, as the official program does
    on a CPU.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def generate_noise(self, input_latent: dict[str, Any]) -> torch.Tensor:
        """fp32 noise of the latent's shape [n, C, h, w]. Picture i of a batch gets seed + i (or its
        ``batch_index``).
        """
        samples = input_latent["samples"]
        indices = input_latent.get("batch_index") or range(samples.shape[0])
        references = list(input_latent.get(REFERENCE_SHAPES, ()))
        return torch.cat([self._one(index, references, (1, *samples.shape[1:])) for index in indices])

    def _one(self, index: int, references: list[tuple[int, ...]], shape: tuple[int, ...]) -> torch.Tensor:
        _, noise = draw_noise((self.seed + index) % (1 << 64), references, shape)
        return noise


class HunyuanImage3ReferenceNoise:
    DESCRIPTION = (
        "The noise that the official program starts from on a CPU with the same seed. Use it with "
        "SamplerCustomAdvanced to compare "
        "pictures; for everything else Random Noise is as good."
    )
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("NOISE",)
    OUTPUT_TOOLTIPS = ("For the noise input of SamplerCustomAdvanced.",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "seed": inputs.seed("Seed of the first picture; picture i of a batch uses seed + i.")
            }
        }

    def make(self, seed: int) -> tuple[ReferenceNoise]:
        return (ReferenceNoise(seed),)
