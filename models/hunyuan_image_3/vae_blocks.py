"""The blocks of the picture autoencoder. Each gets its rank's rows of a picture and the :class:`.vae_rows.PictureRows` that know the others.

Letters: B pictures, C and D channels, T frames, H x W the rank's piece. Attribute names are the checkpoint's keys.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .blocks import NUM_GROUPS, GroupNorm
from .vae_rows import PictureRows

EPS = 1e-6


class Conv3d(nn.Conv3d):
    """Casts its input to the dtype of its weight. Size 3 pads T, H and W with a zero on both sides and is run by `PictureRows`."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3) -> None:
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2)

    def forward(self, x: Tensor) -> Tensor:
        assert self.kernel_size == (1, 1, 1), "it needs the rows of other ranks; call PictureRows.convolve"
        return super().forward(x.to(self.weight.dtype))


def space_to_channel(x: Tensor, rt: int) -> Tensor:
    """[B, C, T*rt, 2y, 2x] -> [B, rt*2*2*C, T, y, x]; channels become (rt, row, column, C), C fastest."""
    b, c, t, h, w = x.shape
    x = x.reshape(b, c, t // rt, rt, h // 2, 2, w // 2, 2)
    return x.permute(0, 3, 5, 7, 1, 2, 4, 6).reshape(b, rt * 4 * c, t // rt, h // 2, w // 2)


def channel_to_space(x: Tensor, rt: int) -> Tensor:
    """The inverse of `space_to_channel`. Not torch's pixel_shuffle, which has C slowest."""
    b, c, t, h, w = x.shape
    x = x.reshape(b, rt, 2, 2, c // (rt * 4), t, h, w)
    return x.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(b, c // (rt * 4), t * rt, h * 2, w * 2)


def group_mean(x: Tensor, n: int) -> Tensor:
    """Mean over consecutive groups of n channels: [B, C*n, ...] -> [B, C, ...]."""
    return x.unflatten(1, (-1, n)).mean(dim=2)


def add_repeated(x: Tensor, short: Tensor, n: int) -> Tensor:
    """x + repeat_interleave(short, n over channels) without building the repeated tensor.

    x [B, C*n, ...], which may be overwritten; short [B, C, ...].
    """
    return add(x.unflatten(1, (-1, n)), short.unsqueeze(2)).flatten(1, 2)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, in x's memory if its dtype can hold the sum (the caller owns x and y broadcasts to it)."""
    return x.add_(y) if torch.promote_types(x.dtype, y.dtype) == x.dtype else x + y


class ResBlock(nn.Module):
    """x + conv2(swish(norm2(conv1(swish(norm1(x))))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(NUM_GROUPS, channels, eps=EPS)
        self.conv1 = Conv3d(channels, channels)
        self.norm2 = GroupNorm(NUM_GROUPS, channels, eps=EPS)
        self.conv2 = Conv3d(channels, channels)

    def forward(self, x: Tensor, lay: PictureRows) -> Tensor:
        """x [B, D, T, H, W] -> the same shape, in x's memory."""
        u = lay.convolved(self.conv1, x, norm=self.norm1)
        for rows, y in lay.convolve(self.conv2, u, norm=self.norm2):
            x[..., rows, :] += y
        return x


class AttnBlock(nn.Module):
    """Single-head attention over all T*H*W positions, with residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = GroupNorm(NUM_GROUPS, channels, eps=EPS)
        self.q = Conv3d(channels, channels, 1)
        self.k = Conv3d(channels, channels, 1)
        self.v = Conv3d(channels, channels, 1)
        self.proj_out = Conv3d(channels, channels, 1)

    def forward(self, x: Tensor, lay: PictureRows) -> Tensor:
        """x [B, D, T, H, W] -> the same shape."""
        u = lay.normed(self.norm, x)
        u = lay.attend(self.q(u), self.k(u), self.v(u), self)
        return add(self.proj_out(u), x)


class Mid(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels)
        self.attn_1 = AttnBlock(channels)
        self.block_2 = ResBlock(channels)

    def forward(self, x: Tensor, lay: PictureRows) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x, lay), lay), lay)


class Downsample(nn.Module):
    """Half the size in space, 1/rt in time. The shortcut is a mean over groups of folded channels."""

    def __init__(self, in_channels: int, out_channels: int, *, rt: int) -> None:
        super().__init__()
        self.rt = rt
        self.group = ratio(4 * rt * in_channels, out_channels)
        self.conv = Conv3d(in_channels, ratio(out_channels, 4 * rt))

    def forward(self, x: Tensor, lay: PictureRows) -> Tensor:
        """x [B, in, T, H, W] -> [B, out, T/rt, H/2, W/2].

        The rule is s2c(conv(x)) + mean over `group` consecutive channels of s2c(x). The input's channels
        are fastest in s2c and `group` divides them, so the mean may come first: one fold of the sum, of a
        smaller tensor.
        """
        folds = [
            space_to_channel(add(y, group_mean(x[..., rows, :], self.group)), self.rt) for rows, y in lay.convolve(self.conv, x, unit=2)
        ]
        return torch.cat(folds, dim=3)


class Upsample(nn.Module):
    """Twice the size in space and rt times in time. The shortcut repeats channels."""

    def __init__(self, in_channels: int, out_channels: int, *, rt: int) -> None:
        super().__init__()
        self.rt = rt
        self.repeat = ratio(4 * rt * out_channels, in_channels)
        self.conv = Conv3d(in_channels, 4 * rt * out_channels)

    def forward(self, x: Tensor, lay: PictureRows) -> Tensor:
        """x [B, in, T, H, W] -> [B, out, T*rt, 2H, 2W] = c2s(conv(x) + repeat_interleave(x, repeat))."""
        b, _, t, h, w = x.shape
        dtype = torch.promote_types(x.dtype, self.conv.weight.dtype)
        out = x.new_empty(b, self.conv.out_channels // (4 * self.rt), t * self.rt, 2 * h, 2 * w, dtype=dtype)
        for rows, y in lay.convolve(self.conv, x):
            y = add_repeated(y, x[..., rows, :], self.repeat)
            out[..., 2 * rows.start : 2 * rows.stop, :] = channel_to_space(y, self.rt)
        return out


def ratio(numerator: int, denominator: int) -> int:
    # The configuration has checked this and names the field if it fails.
    assert numerator >= denominator and numerator % denominator == 0, (numerator, denominator)
    return numerator // denominator
