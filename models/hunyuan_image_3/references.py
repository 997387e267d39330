"""Conditioning pictures on their way into a row: prepared once on the CPU, encoded once on the ranks (spec 4.5, 5.9).

Letters: C latent channels, h×w token grid of the VAE branch, P patch slots of the vision branch.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ...parallel.picture_view import PictureView
from .config import HunyuanImage3Config
from .model import HunyuanImage3Model, ReferenceFeatures
from .reference_images import encoder_input, posterior_sample, vae_pixels, vit_patches
from .resolution import ResolutionTable
from .seeds import seeded_generator
from .sequence import CondImage

_BLOCK = 16


class ReferenceNotKept(RuntimeError):
    """An operation names a picture that this rank does not hold."""


@dataclass(frozen=True)
class PreparedReference:
    """``pixels [3, H, W]`` uint8 of the VAE branch; ``patches [P, 768]`` fp32, ``mask [P]``, ``grid`` (rows, columns) of the vision branch."""

    pixels: torch.Tensor
    ratio_index: int
    patches: torch.Tensor
    mask: torch.Tensor
    grid: tuple[int, int]

    def cond_image(self, config: HunyuanImage3Config) -> CondImage:
        """The sizes that the token row needs."""
        factor = config.vae.ffactor_spatial
        height, width = self.pixels.shape[-2:]
        return CondImage(self.ratio_index, (height // factor, width // factor), self.grid, self.patches.shape[0])


def prepare_reference(image: object, config: HunyuanImage3Config, table: ResolutionTable) -> PreparedReference:
    """Any picture (PIL, uint8 array) as both branches take it."""
    pixels, ratio_index = vae_pixels(image, table)
    patches, mask, grid = vit_patches(image, config.vit)
    return PreparedReference(pixels, ratio_index, patches, mask, grid)


@dataclass(frozen=True)
class EncodedReference:
    """Features plus the intermediate values that comparisons look at."""

    features: ReferenceFeatures
    mean: torch.Tensor
    logvar: torch.Tensor
    vit_features: torch.Tensor


@torch.inference_mode()
def encode_reference(model: HunyuanImage3Model, prepared: PreparedReference, noise: torch.Tensor) -> EncodedReference:
    """VAE posterior sample with ``noise [1, C, h, w]`` fp32, and vision tower plus aligner over all slots, padding included."""
    around, device = model.around, model.device
    mean, logvar = around.vae.encode(encoder_input(prepared.pixels).unsqueeze(0).to(device), PictureView(model.comm))
    vae = model.config.vae
    latent = posterior_sample(mean, logvar, noise.to(device), vae.scaling_factor, shift_factor=vae.shift_factor)
    patches = prepared.patches.unsqueeze(0).to(device, model.dtype)
    hidden = around.vision_model(patches, prepared.mask.unsqueeze(0).to(device), [prepared.grid])
    vit = around.vision_aligner(hidden)[0]
    features = model.reference_features(latent[0], vit, reference_digest(prepared, noise))
    return EncodedReference(features, mean, logvar, vit)


# Enough for two prompts with four pictures each; a 1024² picture takes 34 MB of latent tokens and 8 MB of vision features.
MAX_KEPT = 8


class ReferenceStore:
    """Encoded pictures by the digest of picture, noise and place, so that text, denoise and the next prompt encode nothing twice.

    Every rank sees the same calls, so every rank keeps and forgets the same pictures.
    """

    def __init__(self, model: HunyuanImage3Model):
        self._model = model
        self._kept: OrderedDict[str, tuple[ReferenceFeatures, CondImage]] = OrderedDict()
        self.encoded = 0
        """How many pictures have been encoded so far; those that were kept do not count."""

    def encode(self, prepared: Sequence[PreparedReference], seed: int) -> tuple[str, ...]:
        """Keys of the pictures, encoded unless they are kept. ``seed`` gives the posterior noise, in the order of the pictures."""
        config = self._model.config
        shapes = [(1, config.vae.latent_channels, *picture.cond_image(config).vae_grid) for picture in prepared]
        noises, _ = draw_noise(seed, shapes, (1,))
        keys = []
        for picture, noise in zip(prepared, noises, strict=True):
            key = reference_digest(picture, noise)
            if key not in self._kept:
                encoded = encode_reference(self._model, picture, noise)
                self._kept[key] = (encoded.features, picture.cond_image(config))
                self.encoded += 1
            self._kept.move_to_end(key)
            keys.append(key)
        while len(self._kept) > max(MAX_KEPT, len(keys)):
            self._kept.popitem(last=False)
        return tuple(keys)

    def get(self, keys: Sequence[str]) -> tuple[tuple[ReferenceFeatures, ...], tuple[CondImage, ...]]:
        """Features and sizes of kept pictures.

        Raises:
            ReferenceNotKept: a picture was encoded by another engine or too long ago; encode it again first.
        """
        for key in keys:
            if key not in self._kept:
                raise ReferenceNotKept(
                    "a reference picture is no longer kept on the ranks (the model was loaded again meanwhile); queue the prompt again"
                )
            self._kept.move_to_end(key)
        found = [self._kept[key] for key in keys]
        return tuple(features for features, _ in found), tuple(image for _, image in found)


def reference_digest(picture: PreparedReference, noise: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for part in (picture.pixels, picture.patches, noise.float()):
        digest.update(part.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def draw_noise(
    seed: int, reference_shapes: list[tuple[int, ...]], latent_shape: tuple[int, ...]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Random numbers of one sample in the official order: fp32 posterior noise of each conditioning picture, then the latent in bf16.

    One CPU generator, so that every rank and every device draws the same numbers (spec 4.6). Shapes ``[1, C, h, w]``; results fp32.
    """
    generator = seeded_generator(seed)
    posterior = [torch.randn(shape, generator=generator) for shape in reference_shapes]
    return posterior, _bf16_normal(latent_shape, generator).float()


def _bf16_normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """``torch.randn(shape, dtype=bfloat16)`` of torch 2.13 and newer, in any torch: a seed must not change its picture with the torch version.

    Newer torch draws bf16 normals as rounded fp32 ones in blocks of 16 and takes the last 16 values from one more block; torch 2.11 draws
    other numbers for bf16, but its fp32 blocks are the same.
    """
    count = prod(shape)
    if count < _BLOCK or count % _BLOCK == 0:
        return torch.randn(shape, generator=generator).bfloat16()
    blocks = torch.randn(count // _BLOCK * _BLOCK + _BLOCK, generator=generator)
    return torch.cat([blocks[: count - _BLOCK], blocks[-_BLOCK:]]).reshape(shape).bfloat16()
