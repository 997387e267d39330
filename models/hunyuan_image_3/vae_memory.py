"""How much memory a picture takes in the VAE, how much is free, and the largest tile of the picture that fits.

A rank's piece is exact and needs two activations of the finest level (see `vae`). Where even that does not fit, only tiles are left, whose norms
and attention see no more than the tile; they overlap and are blended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .config import VaeConfig
from .vae_rows import BAND_BYTES
from .vae_split import RowSplit

FP32 = 4
BANDS = 5
"""Bands alive at once: the last result, the next input and its result; and two that a convolution may take for other layouts of these."""

SMALLEST_TILE = 8
"""Latent pixels; below this the borders dominate a tile."""


def free_bytes(device: torch.device) -> int | None:
    """What torch could still allocate on ``device``, with its own unused blocks but those that recorded graphs keep for their replays; None where the
    device is no GPU and has no such limit."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - _kept_by_graphs(device)


def _kept_by_graphs(device: torch.device) -> int:
    """Bytes in the pools of recorded graphs that no tensor holds: torch gives them to nobody else, but counts them as reserved."""
    if torch.cuda.get_allocator_backend() != "native":
        return 0  # CUDA's own allocator, which ComfyUI may choose, lists no blocks, and does not count as reserved what graphs keep
    index = torch.cuda.current_device() if device.index is None else device.index
    pools = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in pools)


def peak_bytes(vae: VaeConfig, *, height: int, width: int, ranks: int) -> int:
    """Bytes beside the weights, on the rank with most rows, to decode ``height`` x ``width`` latent pixels or to encode what gives so many."""
    rows = RowSplit.of(height, ranks=ranks, rank=0).tallest
    pixels = rows * width * vae.ffactor_spatial**2
    finest = FP32 * vae.block_out_channels[0] * vae.ffactor_temporal * pixels
    return 2 * finest + BANDS * min(BAND_BYTES, finest)


@dataclass(frozen=True)
class VaeRoom:
    """Sizes in latent pixels; ``tile`` equals ``whole`` when the picture fits."""

    whole: tuple[int, int]
    tile: tuple[int, int]
    need: int
    free: int | None
    factor: int
    """Pixels of a latent pixel."""

    @classmethod
    def of(cls, vae: VaeConfig, *, height: int, width: int, ranks: int, free: int | None) -> VaeRoom:
        """The whole, or its longer side halved again and again until it fits ``free`` bytes, but not below the smallest useful tile, which is tried
        whatever the estimate says."""
        whole = (height, width)
        need = peak_bytes(vae, height=height, width=width, ranks=ranks)
        while free is not None and max(height, width) > SMALLEST_TILE and peak_bytes(vae, height=height, width=width, ranks=ranks) > free:
            if height > width:
                height = max(-(-height // 2), SMALLEST_TILE)
            else:
                width = max(-(-width // 2), SMALLEST_TILE)
        return cls(whole, (height, width), need, free, vae.ffactor_spatial)

    @property
    def fits(self) -> bool:
        return self.tile == self.whole

    def instead(self) -> dict[str, Any]:
        """What an operation answers instead of a picture: nothing when it fits, else tile: its [height, width] in latent pixels, and measured: why."""
        return {} if self.fits else {"tile": list(self.tile), "measured": {"tiles": self.words()}}

    def words(self) -> str:
        """For the user, what the tiles are and why there are any."""
        assert self.free is not None, "only a limit makes tiles"
        (height, width), need, free = self.tile, self.need / 1e9, self.free / 1e9
        size = f"{height * self.factor}x{width * self.factor} (height x width)"
        return (
            f"VAE in overlapping tiles of {size}, which differ slightly at their borders: the whole picture needs {need:.1f} GB on each rank and "
            f"{free:.1f} GB are free"
        )
