"""Reference pictures on rank 0: from ComfyUI's IMAGE sockets to what the ranks encode, and the keys under which they keep it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..models.hunyuan_image_3.reference_images import MAX_ASPECT
from ..models.hunyuan_image_3.references import (
    PreparedReference,
    draw_noise,
    prepare_reference,
    reference_digest,
)
from ..models.hunyuan_image_3.sequence import CondImage
from .engine_handle import EngineHandle


@dataclass(frozen=True, eq=False)
class References:
    """Pictures of one prompt in order, prepared for both branches. ``keys`` name them on the ranks: equal pictures and seed, equal keys."""

    engine: EngineHandle
    pictures: tuple[PreparedReference, ...]
    seed: int
    keys: tuple[str, ...]

    @property
    def cond_images(self) -> tuple[CondImage, ...]:
        return tuple(picture.cond_image(self.engine.config) for picture in self.pictures)

    @property
    def latent_shapes(self) -> list[tuple[int, ...]]:
        """``[1, C, h, w]`` of each picture's latent, which decide how much noise is drawn before the picture's own."""
        return _latent_shapes(self.engine, self.pictures)

    def encode(self, *, node_id: str | None, report: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Have all ranks hold the encoded pictures. Returns at once where they do; call it once per text or sampling run."""
        if not self.pictures:
            return
        tensors: dict[str, torch.Tensor] = {}
        for number, picture in enumerate(self.pictures):
            tensors[f"pixels{number}"] = picture.pixels
            tensors[f"patches{number}"] = picture.patches
            tensors[f"mask{number}"] = picture.mask.to(torch.uint8)
        values = [{"ratio_index": p.ratio_index, "grid": list(p.grid)} for p in self.pictures]
        args = {"pictures": values, "seed": self.seed}
        result, _ = self.engine.call("encode_references", args, tensors, node_id=node_id, report=report)
        assert tuple(result["keys"]) == self.keys, "ranks name a picture by what they received"


def prepare_references(engine: EngineHandle, images: Sequence[Any], *, seed: int) -> References:
    """``images``: what image1, image2 … hold, None where nothing is connected. ``seed`` gives the noise of the pictures' latents.

    Raises ValueError for a base checkpoint, for a socket that holds several pictures, for a strip beyond 64:1, for pixels that are not numbers,
    and for a value that is no IMAGE.
    """
    connected = [(f"image{number}", image) for number, image in enumerate(images, start=1) if image is not None]
    if connected and engine.config.kind == "base":
        raise ValueError(
            f"{engine.name} is a base checkpoint and draws from text only; disconnect the images or load an Instruct checkpoint."
        )
    pictures = tuple(prepare_reference(_one_picture(name, image), engine.config, engine.table) for name, image in connected)
    noises, _ = draw_noise(seed, _latent_shapes(engine, pictures), (1,))
    keys = tuple(reference_digest(picture, noise) for picture, noise in zip(pictures, noises, strict=True))
    return References(engine, pictures, seed, keys)


def no_references(engine: EngineHandle) -> References:
    """Of a prompt without pictures."""
    return References(engine, (), 0, ())


def _latent_shapes(engine: EngineHandle, pictures: Sequence[PreparedReference]) -> list[tuple[int, ...]]:
    channels = engine.config.vae.latent_channels
    return [(1, channels, *picture.cond_image(engine.config).vae_grid) for picture in pictures]


def _one_picture(name: str, image: Any) -> torch.Tensor:
    """[1, H, W, C] in [0, 1] -> [H, W, C] uint8."""
    shape = list(getattr(image, "shape", ()))
    if len(shape) != 4 or 0 in shape or shape[3] not in (1, 3, 4):
        raise ValueError(f"{name} has shape {shape}, but an IMAGE is [batch, height, width, 1, 3 or 4 channels]; connect an image.")
    if shape[0] != 1:
        raise ValueError(
            f"{name} holds a batch of {shape[0]} pictures, but each input takes one; pick one with ImageFromBatch, "
            "or connect them to image1 to image3."
        )
    height, width = shape[1:3]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(
            f"{name} is {width}x{height} (width x height), but the long side of a picture may be at most {MAX_ASPECT} times the short one; "
            "crop it first."
        )
    if not image.is_floating_point():
        raise ValueError(f"{name} holds {image.dtype} values, but an IMAGE has numbers from 0 to 1; connect an image.")
    # One copy of a huge picture, not one for each operation.
    levels = image[0].to("cpu", torch.float32, copy=True).clamp_(0, 1).mul_(255).round_()
    if bool(torch.isnan(levels).any()):
        raise ValueError(f"{name} has pixels that are not numbers (NaN): a node before it failed; repair it or connect another image.")
    return levels.to(torch.uint8)
