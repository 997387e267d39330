"""Reference pictures of the benchmarks: squares of the model's base size with random features."""

from __future__ import annotations

import torch

from ..models.hunyuan_image_3.config import HunyuanImage3Config
from ..models.hunyuan_image_3.model import HunyuanImage3Model, ReferenceFeatures
from ..models.hunyuan_image_3.sequence import CondImage

SQUARE = 16  # row of the size table


def cond_images(config: HunyuanImage3Config, count: int) -> tuple[CondImage, ...]:
    side = config.image_base_size // config.vae.ffactor_spatial
    patches = round(config.vit.max_num_patches**0.5)
    return (CondImage(SQUARE, (side, side), (patches, patches), config.vit.max_num_patches),) * count


def features_of(model: HunyuanImage3Model, pictures: int) -> tuple[ReferenceFeatures, ...]:
    config, device = model.config, model.device
    side = config.image_base_size // config.vae.ffactor_spatial
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return tuple(
        model.reference_features(
            draw(config.vae.latent_channels, side, side, dtype=torch.float32),
            draw(config.vit.max_num_patches, config.hidden_size, dtype=model.dtype),
            f"picture {number}",
        )
        for number in range(pictures)
    )
