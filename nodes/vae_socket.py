"""The VAE socket: the checkpoint's own autoencoder, run by the engine, with the methods that stock nodes
call.

Latents in ComfyUI's LATENT are unscaled, exactly what the autoencoder gives and takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..models.hunyuan_image_3.vae_memory import SMALLEST_TILE
from . import host_compat
from .engine_handle import EngineHandle

OVERLAP = 8
"""Latent pixels in which the tiles of a picture that does not fit are blended; as stock nodes do."""

_log = logging.getLogger(__name__)

OfPictures = Callable[[torch.Tensor], torch.Tensor]


class HunyuanVae:
    """What `Load HunyuanImage-3.0` puts into the VAE socket."""

    latent_dim = 2

    def __init__(self, engine: EngineHandle) -> None:
        self.engine = engine
        self.downscale_ratio = engine.config.vae.ffactor_spatial
        self.upscale_ratio = engine.config.vae.ffactor_spatial
        self.latent_channels = engine.config.vae.latent_channels

    def spacial_compression_decode(self) -> int:
        return self.upscale_ratio

    def spacial_compression_encode(self) -> int:
        return self.downscale_ratio

    def temporal_compression_decode(self) -> None:
        """None: to stock nodes this is an image VAE; the four frames inside are its own business."""
        return None

    def throw_exception_if_invalid(self) -> None:
        """Newer stock nodes ask; the loader has checked the checkpoint already."""

    def get_sd(self) -> NoReturn:
        raise ValueError(
            "The HunyuanImage-3.0 VAE is spread over the ranks and cannot be saved; use the checkpoint "
            "folder."
        )

    def decode(self, samples: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Latents [n, C, h, w], unscaled -> pictures [n, H, W, 3] in [0, 1]."""
        return _to_image(self._decode_one_by_one(self._checked(samples)))

    def decode_tiled(
        self,
        samples: torch.Tensor,
        tile_x: int = 32,
        tile_y: int = 32,
        overlap: int = 8,
        tile_t: Any = None,
        overlap_t: Any = None,
    ) -> torch.Tensor:
        """As `decode`, in overlapping tiles of latent pixels; needs less memory and differs slightly at tile
        borders.
        """
        tile = (max(tile_x, SMALLEST_TILE), max(tile_y, SMALLEST_TILE))
        return _to_image(self._decode_in_tiles(self._checked(samples), self._decode_one_by_one, tile, overlap))

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pictures [n, H, W, 3 or more] in [0, 1] -> posterior means [n, C, h, w], unscaled. Cropped to
        multiples of 16.
        """
        return self.encode_pixels(self._pixels(pixels)).to(host_compat.result_device())

    def encode_tiled(
        self,
        pixels: torch.Tensor,
        tile_x: int = 512,
        tile_y: int = 512,
        overlap: int = 64,
        tile_t: Any = None,
        overlap_t: Any = None,
    ) -> torch.Tensor:
        """As `encode`, in overlapping tiles of picture pixels."""
        smallest = SMALLEST_TILE * self.downscale_ratio
        tile = (self._aligned(max(tile_x, smallest)), self._aligned(max(tile_y, smallest)))
        return self._encode_in_tiles(self._pixels(pixels), self.encode_pixels, tile, overlap)

    def _aligned(self, pixels: int) -> int:
        return pixels // self.downscale_ratio * self.downscale_ratio

    def _checked(self, samples: torch.Tensor) -> torch.Tensor:
        if samples.ndim != 4 or samples.shape[1] != self.latent_channels:
            raise ValueError(
                f"The latent has shape {list(samples.shape)}, but this VAE decodes [batch, "
                f"{self.latent_channels}, height / 16, "
                "width / 16]; it comes from another model, connect that model's VAE."
            )
        return samples

    def _pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, H, W, >=3] in [0, 1] -> [n, 3, H', W'] in [-1, 1], centre crop to multiples of 16."""
        if pixels.ndim != 4 or pixels.shape[3] < 3 or min(pixels.shape[1:3]) < self.downscale_ratio:
            raise ValueError(
                f"The image has shape {list(pixels.shape)}, but the VAE encodes [batch, height, width, 3] "
                "of at least "
                f"{self.downscale_ratio}x{self.downscale_ratio} pixels; connect an RGB image."
            )
        height, width = (self._aligned(side) for side in pixels.shape[1:3])
        top, left = (
            (side - kept) // 2 for side, kept in zip(pixels.shape[1:3], (height, width), strict=True)
        )
        cropped = pixels[:, top : top + height, left : left + width, :3]
        return cropped.movedim(-1, 1).float() * 2 - 1

    def _decode_one_by_one(self, samples: torch.Tensor) -> torch.Tensor:
        """[n, C, h, w] -> [n, 3, H, W] in [-1, 1], not clamped. One call per picture bounds the memory of the
        last decoder level; a picture that does not fit on the ranks is decoded in tiles.
        """
        return _batch([self._call("vae_decode", "latents", sample, "pixels", self._decode_in_tiles) for sample in samples.split(1)])

    def encode_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3, H, W] in [-1, 1], sides multiples of 16 -> posterior means [n, C, h, w], unscaled."""
        return _batch([self._call("vae_encode", "pixels", picture, "latents", self._encode_in_tiles) for picture in pixels.split(1)])

    def _decode_in_tiles(self, samples: torch.Tensor, decode: OfPictures, tile: tuple[int, int], overlap: int) -> torch.Tensor:
        """`tile` is (width, height) in latent pixels, as is `overlap`."""
        overlap = min(overlap, min(tile) // 2)
        return host_compat.tiled(samples, decode, tile=tile, overlap=overlap, scale=self.upscale_ratio, out_channels=3)

    def _encode_in_tiles(self, pixels: torch.Tensor, encode: OfPictures, tile: tuple[int, int], overlap: int) -> torch.Tensor:
        """`tile` is (width, height) in pixels, as is `overlap`."""
        return host_compat.tiled(
            pixels,
            encode,
            tile=tile,
            overlap=self._aligned(min(overlap, min(tile) // 2)),
            scale=1 / self.downscale_ratio,
            out_channels=self.latent_channels,
        )

    def _call(self, op: str, name: str, value: torch.Tensor, result: str, in_tiles: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The operation on one picture: as a whole, or with `in_tiles` if the ranks say that it does not fit, which the user is told."""
        node_id = host_compat.running_node_id()

        def run(value: torch.Tensor, args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
            return self.engine.call(op, args, {name: value.float().contiguous()}, node_id=node_id)

        values, tensors = run(value, {})
        if "tile" not in values:
            return tensors[result].float()
        _log.warning("%s", values["measured"]["tiles"])
        host_compat.show_text(values["measured"]["tiles"], node_id)
        unit = 1 if op == "vae_decode" else self.downscale_ratio
        height, width = (side * unit for side in values["tile"])
        return in_tiles(value, lambda part: run(part, {"tile": True})[1][result].float(), (width, height), OVERLAP * unit)


def _batch(pictures: list[torch.Tensor]) -> torch.Tensor:
    """One tensor; tiles are joined on another device than whole pictures come from."""
    return torch.cat([picture.to(pictures[0].device) for picture in pictures])


def _to_image(pixels: torch.Tensor) -> torch.Tensor:
    """[n, 3, H, W] nominal [-1, 1] -> ComfyUI IMAGE [n, H, W, 3] in [0, 1] on ComfyUI's result device."""
    return (pixels * 0.5 + 0.5).clamp(0, 1).movedim(1, -1).to(host_compat.result_device())


def engine_of_vae(vae: object) -> EngineHandle:
    """The engine behind a VAE input. Raises ValueError for another model's VAE."""
    if not isinstance(vae, HunyuanVae):
        raise ValueError(
            "The vae input is not from Load HunyuanImage-3.0; connect that node's VAE output (other "
            "autoencoders do not fit)."
        )
    return vae.engine
