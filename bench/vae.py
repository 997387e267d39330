"""One picture of ``phase-parallel bench vae``: decoded and encoded by one rank, and by all of them together.

What one rank makes alone is what the pieces of all ranks must give. Pictures and latents are noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ..models.hunyuan_image_3.config import VaeConfig
from ..models.hunyuan_image_3.engine import Engine
from ..models.hunyuan_image_3.vae_memory import FP32, VaeRoom, free_bytes
from ..models.hunyuan_image_3.vae_rows import BAND_BYTES
from ..models.hunyuan_image_3.vae_split import RowSplit, bands
from ..parallel.section import digest_of
from .timing import Spread, synchronize, wall_milliseconds

Direction = Literal["decode", "encode"]
Way = Literal["one rank", "all ranks"]
DIRECTIONS: tuple[Direction, ...] = ("decode", "encode")
OVERLAP = 8
"""Latent pixels in which tiles overlap, as the VAE's socket has them."""


@dataclass(frozen=True)
class VaeRow:
    """One line of the table. Sizes in pixels; ``peak_gb`` and ``need_gb`` beside the weights, measured and as the pack counts it before it begins."""

    direction: str
    height: int
    width: int
    way: str
    ranks: int
    path: str
    """whole: a rank's piece at once; bands: its convolutions go through it in parts, which is exact; tiles: overlapping parts of the picture."""
    bands: int
    """Of a convolution of the finest level."""
    tile: tuple[int, int]
    ms: Spread
    peak_gb: float
    need_gb: float
    difference: float | None
    """The largest one to what one rank makes, None where nothing is compared; ``largest`` value of that."""
    largest: float | None
    digest: str


class VaePicture:
    """A picture of one size, and its way in both directions."""

    def __init__(self, engine: Engine, height: int, width: int):
        self._engine, self._vae = engine, engine.model.around.vae
        self.config: VaeConfig = engine.config.vae
        self.factor = self.config.ffactor_spatial
        self.height, self.width = height, width
        self.grid = (height // self.factor, width // self.factor)
        generator = torch.Generator().manual_seed(0)
        latent = torch.randn(1, self.config.latent_channels, *self.grid, generator=generator)
        pixels = torch.rand(1, 3, height, width, generator=generator) * 2 - 1
        device = engine.model.device
        self.inputs: dict[Direction, torch.Tensor] = {"decode": latent.to(device), "encode": pixels.to(device)}

    def room(self, way: Way) -> VaeRoom:
        """Collective for all ranks."""
        if way == "all ranks":
            return self._engine.vae_room(*self.grid)
        height, width = self.grid
        return VaeRoom.of(self.config, height=height, width=width, ranks=1, free=free_bytes(self._engine.model.device))

    def run(self, direction: Direction, way: Way, part: torch.Tensor) -> torch.Tensor:
        """``part``: latents or pixels; the result lies on the device."""
        with torch.inference_mode():
            if way == "all ranks":
                return self._engine.vae_decode(part) if direction == "decode" else self._engine.vae_encode(part)[0]
            return self._vae.decode(part) if direction == "decode" else self._vae.encode(part)[0]

    def parts(self, direction: Direction, tile: tuple[int, int]) -> list[torch.Tensor]:
        """The input in overlapping tiles of ``tile`` latent pixels (height, width); itself where one tile is all."""
        scale = 1 if direction == "decode" else self.factor
        whole = self.inputs[direction]
        rows, columns = (tile_starts(size, part) for size, part in zip(self.grid, tile, strict=True))
        return [whole[:, :, top * scale : (top + tile[0]) * scale, left * scale : (left + tile[1]) * scale] for top in rows for left in columns]


def tile_starts(size: int, tile: int) -> list[int]:
    """Where tiles begin that overlap and cover ``size``; the last one ends with it."""
    overlap = min(OVERLAP, tile // 2)
    if tile >= size:
        return [0]
    return [*range(0, size - tile, tile - overlap), size - tile]


def finest_bands(vae: VaeConfig, grid: tuple[int, int], ranks: int) -> int:
    """Parts in which a convolution of the finest level goes through the tallest piece."""
    rows = RowSplit.of(grid[0], ranks=ranks, rank=0).tallest * vae.ffactor_spatial
    row_bytes = FP32 * vae.ffactor_temporal * grid[1] * vae.ffactor_spatial * vae.block_out_channels[0]
    return len(bands(rows, BAND_BYTES // row_bytes))


def measure_way(
    picture: VaePicture, direction: Direction, way: Way, ranks: int, wanted: torch.Tensor | None, *, repeats: int, barrier: Callable[[], None]
) -> tuple[VaeRow, torch.Tensor | None]:
    """Collective for all ranks. The row, and the result of the whole picture, None where it went in tiles. ``wanted``: what the result is compared with."""
    device = picture.inputs[direction].device
    room = picture.room(way)
    parts = picture.parts(direction, room.tile)
    number = finest_bands(picture.config, room.tile, ranks)
    before = _reset_peak(device)
    results: list[torch.Tensor] = []

    def run() -> None:
        results.clear()
        results.extend(picture.run(direction, way, part) for part in parts)

    ms = wall_milliseconds(run, device, repeats=repeats, barrier=barrier)
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    whole = results[0] if room.fits else None
    row = VaeRow(
        direction=direction,
        height=picture.height,
        width=picture.width,
        way=way,
        ranks=ranks,
        path="tiles" if not room.fits else "whole" if number == 1 else "bands",
        bands=number,
        tile=(room.tile[0] * picture.factor, room.tile[1] * picture.factor),
        ms=ms,
        peak_gb=peak / 1e9,
        need_gb=room.need / 1e9,
        difference=None if wanted is None or whole is None else float((whole - wanted).abs().max()),
        largest=None if wanted is None or whole is None else float(wanted.abs().max()),
        digest=digest_of({}, {f"part{i}": result for i, result in enumerate(results)}),
    )
    return row, whole


def _reset_peak(device: torch.device) -> int:
    """Bytes that are allocated now."""
    synchronize(device)
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
