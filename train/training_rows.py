"""The VAE's convolutions, norms and attention in a form that gradients pass through: stands in for `vae_rows.PictureRows` while the VAE is trained.

Letters: B pictures, C and D channels, T frames, H x W the picture. Imports torch.

`PictureRows` works in place and in bands, for one rank's rows of one picture. Here a batch of whole pictures is one band, and convolutions do not look at
other frames: a convolution is one of two dimensions, with the middle one of a kernel's three planes in time. `drop_outer_planes` sets the other two to
zero; of a single frame, which the mini model has, they would meet nothing but padding anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TrainingRows:
    """What the blocks of the VAE ask of a `PictureRows`, for all rows at once. Holds nothing."""

    def convolve(self, conv: nn.Conv3d, x: Tensor, *, norm: nn.GroupNorm | None = None, unit: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """conv(swish(norm(x))), or conv(x), as the only band: (all rows, ``[B, D, T, H, W]``)."""
        yield slice(0, x.shape[3]), self.convolved(conv, x, norm=norm)

    def convolved(self, conv: nn.Conv3d, x: Tensor, *, norm: nn.GroupNorm | None = None) -> Tensor:
        """conv(swish(norm(x))), or conv(x): ``[B, C, T, H, W]`` -> ``[B, D, T, H, W]``."""
        if norm is not None:
            x = F.silu(self.normed(norm, x))
        batch, frames = x.shape[0], x.shape[2]
        pictures = x.transpose(1, 2).flatten(0, 1)  # [B*T, C, H, W]
        return F.conv2d(pictures, conv.weight[:, :, 1], conv.bias, padding=1).unflatten(0, (batch, frames)).transpose(1, 2)

    def normed(self, norm: nn.GroupNorm, x: Tensor) -> Tensor:
        """norm(x) in fp32. Of a copy: a block adds to ``x`` in place, and the gradient of the norm needs it as it was."""
        return norm(x.clone())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, site: nn.Module) -> Tensor:
        """Attention over all positions of each picture; all ``[B, D, T, H, W]``, one head."""
        out = F.scaled_dot_product_attention(*(t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (q, k, v)))
        return out.squeeze(1).transpose(1, 2).reshape(q.shape)


def drop_outer_planes(network: nn.Module) -> None:
    """Sets to zero, in every kernel of three planes in time, the outer two. They get no gradient here and stay so."""
    with torch.no_grad():
        for conv in network.modules():
            if isinstance(conv, nn.Conv3d) and conv.kernel_size[0] == 3:
                conv.weight[:, :, 0::2] = 0


def has_outer_planes(network: nn.Module) -> bool:
    """Whether some kernel looks at other frames, which `TrainingRows` would not."""
    kernels = [conv.weight for conv in network.modules() if isinstance(conv, nn.Conv3d) and conv.kernel_size[0] == 3]
    return any(bool(weight[:, :, 0::2].any()) for weight in kernels)
