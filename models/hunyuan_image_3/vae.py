"""The picture autoencoder: 3D convolutions, stride 16 in space and 4 in time.

Letters: B pictures, C latent channels, T frames, H x W the picture, h x w = H/16 x W/16.

A picture enters as T equal frames and leaves as the last of T frames; the others must be computed, since
convolutions, norms and attention mix time. Attribute names are the checkpoint's keys below `vae.`.

Memory: at 1024 x 1024 in fp32 one activation of the finest level is 2 GiB. Pictures are processed one at
a time, nothing is kept for a backward pass, and buffers that nobody else holds are overwritten, so that
three of these activations are alive at the peak (input, normed input, convolution result).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import NUM_GROUPS, GroupNorm
from .config import VaeConfig

EPS = 1e-6
LOGVAR_RANGE = (-30.0, 20.0)


class Conv3d(nn.Conv3d):
    """Casts its input to the dtype of its weight; size 3 pads T, H and W with a zero on both sides."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3) -> None:
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2)

    def forward(self, x: Tensor) -> Tensor:
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
    return _add(x.unflatten(1, (-1, n)), short.unsqueeze(2)).flatten(1, 2)


def _add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, in x's memory if its dtype can hold the sum (the caller owns x and y broadcasts to it)."""
    return x.add_(y) if torch.promote_types(x.dtype, y.dtype) == x.dtype else x + y


def _norm_swish(norm: GroupNorm, x: Tensor) -> Tensor:
    """swish(norm(x)) in fp32; the norm's fresh result is overwritten."""
    return F.silu(norm(x), inplace=True)


Check = Callable[[int, int], None]


def _no_check(done: int, total: int) -> None:
    return None


class ResBlock(nn.Module):
    """x + conv2(swish(norm2(conv1(swish(norm1(x))))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(NUM_GROUPS, channels, eps=EPS)
        self.conv1 = Conv3d(channels, channels)
        self.norm2 = GroupNorm(NUM_GROUPS, channels, eps=EPS)
        self.conv2 = Conv3d(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, D, T, H, W] -> the same shape; x is left as it was."""
        u = self.conv1(_norm_swish(self.norm1, x))
        u = _norm_swish(self.norm2, u)
        return _add(self.conv2(u), x)


class AttnBlock(nn.Module):
    """Single-head attention over all T*H*W positions, with residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = GroupNorm(NUM_GROUPS, channels, eps=EPS)
        self.q = Conv3d(channels, channels, 1)
        self.k = Conv3d(channels, channels, 1)
        self.v = Conv3d(channels, channels, 1)
        self.proj_out = Conv3d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, D, T, H, W] -> the same shape."""
        u = self.norm(x)
        q, k, v = (conv(u).flatten(2).transpose(1, 2).unsqueeze(1) for conv in (self.q, self.k, self.v))
        u = F.scaled_dot_product_attention(q, k, v)  # [B, 1, T*H*W, D]
        return _add(self.proj_out(u.squeeze(1).transpose(1, 2).reshape(x.shape)), x)


class Mid(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels)
        self.attn_1 = AttnBlock(channels)
        self.block_2 = ResBlock(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Downsample(nn.Module):
    """Half the size in space, 1/rt in time. The shortcut is a mean over groups of folded channels."""

    def __init__(self, in_channels: int, out_channels: int, *, rt: int) -> None:
        super().__init__()
        self.rt = rt
        self.group = _ratio(4 * rt * in_channels, out_channels)
        self.conv = Conv3d(in_channels, _ratio(out_channels, 4 * rt))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in, T, H, W] -> [B, out, T/rt, H/2, W/2].

        The rule is s2c(conv(x)) + mean over `group` consecutive channels of s2c(x). The input's channels
        are fastest in s2c and `group` divides them, so the mean may come first: one fold of the sum, of a
        smaller tensor.
        """
        return space_to_channel(_add(self.conv(x), group_mean(x, self.group)), self.rt)


class Upsample(nn.Module):
    """Twice the size in space and rt times in time. The shortcut repeats channels."""

    def __init__(self, in_channels: int, out_channels: int, *, rt: int) -> None:
        super().__init__()
        self.rt = rt
        self.repeat = _ratio(4 * rt * out_channels, in_channels)
        self.conv = Conv3d(in_channels, 4 * rt * out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in, T, H, W] -> [B, out, T*rt, 2H, 2W] = c2s(conv(x) + repeat_interleave(x, repeat))."""
        return channel_to_space(add_repeated(self.conv(x), x, self.repeat), self.rt)


def _ratio(numerator: int, denominator: int) -> int:
    # The configuration has checked this and names the field if it fails.
    assert numerator >= denominator and numerator % denominator == 0, (numerator, denominator)
    return numerator // denominator


def _level(channels: int, num_blocks: int, **resize: nn.Module) -> nn.ModuleDict:
    """One level's residual blocks and, unless it is the last, its change of size, in running order."""
    blocks = nn.ModuleList(ResBlock(channels) for _ in range(num_blocks))
    return nn.ModuleDict({"block": blocks, **resize})


def _steps(levels: nn.ModuleList) -> list[nn.Module]:
    """All parts of all levels in running order.

    They run in one flat loop, because a forward per level would hold the level's input until the level's
    end.
    """
    return [
        step
        for level in levels
        for part in level.values()
        for step in (part if isinstance(part, nn.ModuleList) else [part])
    ]


class Encoder(nn.Module):
    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        channels = config.block_out_channels
        num_blocks = config.layers_per_block
        # Time is folded by the last size changes: those after levels 2 and 3 of 0..4 in the release.
        first_temporal = config.spatial_levels - config.temporal_levels
        self.conv_in = Conv3d(config.in_channels, channels[0])
        self.down = nn.ModuleList(
            _level(size, num_blocks, downsample=Downsample(size, following, rt=1 + (i >= first_temporal)))
            for i, (size, following) in enumerate(pairwise(channels))
        )
        self.down.append(_level(channels[-1], num_blocks))
        self.mid = Mid(channels[-1])
        self.norm_out = GroupNorm(NUM_GROUPS, channels[-1], eps=EPS)
        self.conv_out = Conv3d(channels[-1], 2 * config.latent_channels)
        self.group_out = _ratio(channels[-1], 2 * config.latent_channels)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 3, T, H, W] -> moments [B, 2*C, T/4, H/16, W/16]."""
        for step in (self.conv_in, *_steps(self.down), self.mid):
            x = step(x)
        return _add(self.conv_out(_norm_swish(self.norm_out, x)), group_mean(x, self.group_out))


class Decoder(nn.Module):
    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        channels = config.block_out_channels[::-1]
        num_blocks = config.layers_per_block + 1
        self.conv_in = Conv3d(config.latent_channels, channels[0])
        self.repeat_in = _ratio(channels[0], config.latent_channels)
        self.mid = Mid(channels[0])
        self.up = nn.ModuleList(
            _level(size, num_blocks, upsample=Upsample(size, following, rt=1 + (i < config.temporal_levels)))
            for i, (size, following) in enumerate(pairwise(channels))
        )
        self.up.append(_level(channels[-1], num_blocks))
        self.norm_out = GroupNorm(NUM_GROUPS, channels[-1], eps=EPS)
        self.conv_out = Conv3d(channels[-1], config.out_channels)

    def forward(self, z: Tensor, check: Check = _no_check) -> Tensor:
        """z [B, C, T, h, w] -> [B, 3, 4T, 16h, 16w]. ``check(done, total)`` runs before each part and may end it by raising."""
        x = add_repeated(self.conv_in(z), z, self.repeat_in)
        parts = [self.mid, *_steps(self.up)]
        for done, part in enumerate(parts):
            check(done, len(parts))
            x = part(x)
        return self.conv_out(_norm_swish(self.norm_out, x))


class Vae(nn.Module):
    """Encoder and decoder of single pictures."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """pixels [B, 3, H, W] in [-1, 1] -> (mean, logvar), each [B, C, h, w], logvar clamped to [-30, 20].

        Raises ValueError if H or W is not a multiple of the spatial factor.
        """
        factor = self.config.ffactor_spatial
        height, width = pixels.shape[-2:]
        if height % factor or width % factor:
            raise ValueError(
                f"a picture of {height}x{width} (height x width) cannot be encoded: both sides must be "
                f"multiples of {factor}; resize or crop it first"
            )
        frames = self.config.ffactor_temporal
        clips = pixels.unsqueeze(2).expand(-1, -1, frames, -1, -1)
        moments = torch.cat([self.encoder(clip[None])[:, :, 0] for clip in clips])
        mean, logvar = moments.chunk(2, dim=1)
        return mean, logvar.clamp(*LOGVAR_RANGE)

    @torch.no_grad()
    def decode(self, latent: Tensor, check: Check = _no_check) -> Tensor:
        """latent [B, C, h, w], already divided by the scaling factor -> picture [B, 3, H, W].

        It is the last frame, nominally in [-1, 1] and not clamped. ``check`` as in Decoder, for each picture anew.
        """
        return torch.cat([self.decoder(z[None, :, None], check)[:, :, -1] for z in latent])
