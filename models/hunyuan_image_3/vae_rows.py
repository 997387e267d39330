"""The work of the VAE that looks beyond a rank's own rows: convolutions, group norms, attention.

Letters: B pictures, D channels, T frames, R rows of this rank's piece, W columns; P pieces.

The rows of a picture are dealt over the ranks (:class:`.vae_split.RowSplit`). A convolution of size 3 needs one row of each neighbour, a group
norm the moments of all pieces, attention the keys and values of all. Nothing is approximated: a row is computed from the same numbers as on a
rank alone. A rank alone is a picture of one piece.

Memory: swish(norm(x)) is never there as a whole. A convolution goes through its piece in bands of rows, and norms, pads and casts a band at a
time; the bands are exact too, since they overlap by the rows that the convolution needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...parallel.ledger import Role
from ...parallel.picture_view import PictureView
from .vae_split import RowSplit, bands

BAND_BYTES = 256 << 20
"""Input or result of one band in fp32. Large enough to fill a GPU, small next to the pieces of a picture that needs care."""


class PictureRows:
    """One rank's piece of one picture: how it lies among the others and how the ranks exchange what they need."""

    def __init__(self, split: RowSplit, view: PictureView | None = None, names: Mapping[nn.Module, str] | None = None, band_bytes: int = BAND_BYTES):
        """``view`` may be missing for a picture of one piece; ``names`` of the modules are the sites of their collectives."""
        assert view is not None or len(split.heights) == 1, "pieces on other ranks need a view to reach them"
        self.split = split
        self._view = view
        self._names = names or {}
        self._band_bytes = band_bytes
        self._shares: Tensor | None = None

    @classmethod
    def alone(cls, height: int) -> PictureRows:
        """All of a picture of ``height`` latent rows."""
        return cls(RowSplit.of(height, ranks=1, rank=0))

    def convolve(self, conv: nn.Conv3d, x: Tensor, *, norm: nn.GroupNorm | None = None, unit: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """conv(swish(norm(x))), or conv(x), band by band: (rows of the piece, ``[B, D, T, rows, W]``); rows are multiples of ``unit``.

        ``x [B, D, T, R, W]`` is read until the last band is there; results are fresh tensors in the dtype of the weights.
        """
        above, below = self._neighbours(x, self._names.get(conv, "convolution"))
        affine = None if norm is None else self._affine(norm, x)
        row_bytes = 4 * x[:, 0, :, 0].numel() * max(conv.in_channels, conv.out_channels)
        for rows in bands(x.shape[3], self._band_bytes // row_bytes, unit):
            padded = self._band(x, rows, above, below, affine)
            yield rows, F.conv3d(padded.to(conv.weight.dtype), conv.weight, conv.bias, padding=(1, 0, 1))

    def convolved(self, conv: nn.Conv3d, x: Tensor, *, norm: nn.GroupNorm | None = None) -> Tensor:
        """As ``convolve``, all rows of the piece in one tensor."""
        out = x.new_empty(x.shape[0], conv.out_channels, *x.shape[2:], dtype=conv.weight.dtype)
        for rows, y in self.convolve(conv, x, norm=norm):
            out[..., rows, :] = y
        return out

    def normed(self, norm: nn.GroupNorm, x: Tensor) -> Tensor:
        """norm(x) in fp32, ``[B, D, T, R, W]``."""
        scale, shift = self._affine(norm, x)
        return torch.addcmul(shift, x.float(), scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, site: nn.Module) -> Tensor:
        """Attention of this piece's positions over those of the whole picture; all ``[B, D, T, R, W]``, one head."""
        keys, values = self._joined("kv_gather", torch.stack([k, v]), self._names.get(site, "attention"))
        flat = (t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (q, keys, values))
        out = F.scaled_dot_product_attention(*flat)  # [B, 1, positions, D]
        return out.squeeze(1).transpose(1, 2).reshape(q.shape)

    def whole(self, piece: Tensor, what: str) -> Tensor:
        """The pieces of all ranks as one picture, the same bits on each of them: ``[..., R, W]`` -> ``[..., H, W]``."""
        picture = self._joined("picture_gather", piece, what)
        if self._view is not None:
            self._view.await_device(what)
        return picture

    def _gather(self, role: Role, tensor: Tensor, site: str) -> list[Tensor]:
        """``tensor`` of every piece. What ranks without a piece of their own send is dropped."""
        if self._view is None:
            return [tensor]
        return self._view.gather(role, tensor, site)[: len(self.split.heights)]

    def _joined(self, role: Role, piece: Tensor, site: str) -> Tensor:
        """Pieces ``[..., R, W]`` of all heights, one below the other. They travel at the height of the tallest, since a gather wants one shape."""
        split = self.split
        scale = piece.shape[-2] // split.heights[split.mine]
        sent = F.pad(piece, (0, 0, 0, split.tallest * scale - piece.shape[-2]))
        pieces = self._gather(role, sent, site)
        return torch.cat([piece[..., : height * scale, :] for piece, height in zip(pieces, split.heights, strict=True)], dim=-2)

    def _neighbours(self, x: Tensor, site: str) -> tuple[Tensor | None, Tensor | None]:
        """The last row of the piece above and the first of the piece below, each ``[B, D, T, 1, W]``; None at the picture's border."""
        first, last = x[:, :, :, :1], x[:, :, :, -1:]
        edges = self._gather("halo_gather", torch.cat([first, last], dim=3), site)
        above, below = self.split.above, self.split.below
        return (None if above is None else edges[above][:, :, :, 1:], None if below is None else edges[below][:, :, :, :1])

    def _band(
        self, x: Tensor, rows: slice, above: Tensor | None, below: Tensor | None, affine: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Rows of ``x`` with one more on each side, normed and swished if ``affine`` is there; zeros beyond the picture's border."""
        inside = slice(max(rows.start - 1, 0), min(rows.stop + 1, x.shape[3]))
        parts = [x[:, :, :, inside]]
        first, last = rows.start == 0, rows.stop == x.shape[3]
        if first and above is not None:
            parts.insert(0, above)
        if last and below is not None:
            parts.append(below)
        shape = (*x.shape[:3], rows.stop - rows.start + 2, x.shape[4])
        band = x.new_empty(shape, dtype=x.dtype if affine is None else torch.float32)
        at = int(first and above is None)
        band[:, :, :, :at] = 0
        for part in parts:
            place = band[:, :, :, at : at + part.shape[3]]
            if affine is None:
                place.copy_(part)
            else:
                scale, shift = affine
                F.silu(torch.addcmul(shift, part.float(), scale, out=place), inplace=True)
            at += part.shape[3]
        band[:, :, :, at:] = 0
        return band

    def _affine(self, norm: nn.GroupNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """Group norm over all pieces as ``x * scale + shift``, both fp32 ``[B, D, 1, 1, 1]``.

        Each piece's mean and variance are joined in fp64, in the order of the pieces, so that all ranks norm with the same numbers.
        """
        grouped = x.float().unflatten(1, (norm.num_groups, -1))
        moments = torch.stack(torch.var_mean(grouped, dim=(2, 3, 4, 5), correction=0)).double()
        variances, means = torch.stack(self._gather("norm_gather", moments, self._names.get(norm, "norm")), dim=1)
        if self._shares is None:
            self._shares = torch.tensor(self.split.shares, dtype=torch.float64, device=x.device)[:, None, None]
        mean = (self._shares * means).sum(0)  # [B, groups]
        variance = (self._shares * (variances + (means - mean) ** 2)).sum(0)
        deviation = (variance + norm.eps).rsqrt()
        scale = deviation[:, :, None] * norm.weight.double().unflatten(0, (norm.num_groups, -1))
        shift = norm.bias.double().unflatten(0, (norm.num_groups, -1)) - mean[:, :, None] * scale
        return tuple(t.flatten(1).float()[:, :, None, None, None] for t in (scale, shift))
