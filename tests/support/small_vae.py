"""An autoencoder with the structure of the release and few channels."""

from __future__ import annotations

import torch
from torch import Tensor

from phase_parallel.models.hunyuan_image_3.config import VaeConfig
from phase_parallel.models.hunyuan_image_3.vae import Vae

SMALL = VaeConfig((32, 64, 64, 64, 64), 3, 3, 8, 1, 16, 4, 0.5, None)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small_vae() -> Vae:
    vae = Vae(SMALL).requires_grad_(False)
    for number, parameter in enumerate(vae.parameters()):
        parameter.data = seeded(*parameter.shape, seed=number) * 0.06 + (parameter.dim() == 1) * 0.5
    return vae
