"""Conditioning pictures: from what a user gives to the inputs of the VAE encoder and of the vision tower.

Each picture enters the model twice. The VAE branch covers a row of the size table (Pillow's LANCZOS, centre
crop) and must agree to the last bit; the vision branch fits the picture into the patch budget (torch's
antialiased bilinear resize on uint8). Runs on the CPU; imports Pillow, numpy and torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from .config import VitConfig

if TYPE_CHECKING:
    from .resolution import ResolutionTable

Picture = Image.Image | np.ndarray | Tensor

SCALE_RANGE = (1e-6, 100.0)
SCALE_EPS = 1e-5
# A longer picture would be resized to gigabytes before its centre is cut out.
MAX_ASPECT = 64


class ReferenceImageError(ValueError):
    """A conditioning picture that cannot be used."""


def to_rgb(image: Picture) -> Image.Image:
    """A picture as 8-bit RGB, upright: EXIF orientation applied, alpha dropped (not composited).

    Arrays and tensors are uint8, [H, W] or [H, W, 1, 3 or 4]. 16-bit grey pictures are scaled to 8 bits;
    a plain conversion would clip them to white. Raises ReferenceImageError for anything else.
    """
    if not isinstance(image, Image.Image):
        image = _from_array(image)
    width, height = image.size
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise ReferenceImageError(
            f"a conditioning picture of {width}x{height} (width x height) cannot be used: its long side "
            f"may be at most {MAX_ASPECT} times its short side; crop it first"
        )
    image = ImageOps.exif_transpose(image)
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow opens 16-bit grey files in one of these modes, depending on its version.
        grey = np.asarray(image).astype(np.float64).clip(0, 65535)
        image = Image.fromarray(np.rint(grey / 257).astype(np.uint8))
    elif image.mode == "F":
        raise ReferenceImageError(
            "a conditioning picture holds floating-point values, whose range is unknown; "
            "save it as 8-bit RGB first"
        )
    elif image.mode == "La":
        image = image.convert("LA")
    elif image.mode == "P" and "transparency" in image.info:
        # The same colours; Pillow warns about the direct way.
        image = image.convert("RGBA")
    return image.convert("RGB")


def _from_array(array: np.ndarray | Tensor) -> Image.Image:
    array = array.detach().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
    if array.dtype != np.uint8:
        raise ReferenceImageError(
            f"a conditioning picture given as an array must be uint8, not {array.dtype}; "
            "scale it to 0..255 and round"
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] in (3, 4)):
        raise ReferenceImageError(
            "a conditioning picture given as an array must be [height, width] or [height, width, 1, 3 or 4], "
            f"not {list(array.shape)}; pass one picture at a time, channels last"
        )
    return Image.fromarray(np.ascontiguousarray(array))


def vae_pixels(image: Picture, table: ResolutionTable) -> tuple[Tensor, int]:
    """(pixels [3, H, W] uint8, ratio index); H x W is the table row nearest to the picture's own ratio.

    The picture is resized to cover the row, aspect ratio kept, and the centre is cut out.
    """
    rgb = to_rgb(image)
    width, height = rgb.size
    index = table.nearest(height, width)
    target_h, target_w = table.rows[index]
    # Python's rounding (half to even) and this order of operations are part of the rule.
    if height / width < target_h / target_w:
        resized_h, resized_w = target_h, round(target_h / height * width)
    else:
        resized_h, resized_w = round(target_w / width * height), target_w
    rgb = rgb.resize((resized_w, resized_h), Image.Resampling.LANCZOS)
    top = round((resized_h - target_h) / 2)
    left = round((resized_w - target_w) / 2)
    rgb = rgb.crop((left, top, left + target_w, top + target_h))
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous(), index


def encoder_input(pixels: Tensor) -> Tensor:
    """pixels [..., 3, H, W] uint8 -> the same shape in fp32, in [-1, 1]."""
    return (pixels.float() / 255 - 0.5) / 0.5


def vit_size(height: int, width: int, *, patch_size: int, max_num_patches: int) -> tuple[int, int]:
    """(height, width) in multiples of the patch size: the largest scale whose patches fit the budget.

    Small pictures grow to use it. The bisection's bounds and end belong to the rule: they decide border
    cases.
    """

    def scaled(side: int, scale: float) -> int:
        return max(patch_size, math.ceil(side * scale / patch_size) * patch_size)

    low, high = SCALE_RANGE
    while high - low >= SCALE_EPS:
        middle = (low + high) / 2
        rows, columns = scaled(height, middle) // patch_size, scaled(width, middle) // patch_size
        if rows * columns <= max_num_patches:
            low = middle
        else:
            high = middle
    return scaled(height, low), scaled(width, low)


def vit_patches(image: Picture, vit: VitConfig) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """(patches [P, patch*patch*3] fp32, mask [P] bool, (gh, gw)), P = vit.max_num_patches.

    Patches are row-major, each flattened as (row, column, channel), channel fastest, values in [-1, 1].
    Slots after gh*gw are zero and false in the mask.
    """
    rgb = to_rgb(image)
    patch, num_slots = vit.patch_size, vit.max_num_patches
    height, width = vit_size(rgb.height, rgb.width, patch_size=patch, max_num_patches=num_slots)
    gh, gw = height // patch, width // patch
    pixels = torch.from_numpy(np.array(rgb)).permute(2, 0, 1)[None]
    # On uint8, not on floats: rounding to 8 bits in between is part of the rule.
    resized = F.interpolate(pixels, (height, width), mode="bilinear", align_corners=False, antialias=True)
    pixels = (resized[0].float() - 127.5) / 127.5
    tiles = pixels.unflatten(2, (gw, patch)).unflatten(1, (gh, patch))  # [3, gh, patch, gw, patch]
    patches = torch.zeros(num_slots, vit.patch_dim)
    patches[: gh * gw] = tiles.permute(1, 3, 2, 4, 0).reshape(gh * gw, -1)
    return patches, torch.arange(num_slots) < gh * gw, (gh, gw)


def posterior_sample(
    mean: Tensor, logvar: Tensor, noise: Tensor, scaling_factor: float, *, shift_factor: float | None = None
) -> Tensor:
    """The conditioning latent (mean + exp(logvar / 2) * noise - shift) * scaling_factor, in fp32.

    mean, logvar, noise [B, C, h, w]. The model wants a sample, not the mean; the caller draws the fp32 noise.
    """
    sample = mean.float() + torch.exp(0.5 * logvar.float()) * noise
    if shift_factor is not None:
        sample = sample - shift_factor
    return sample * scaling_factor
